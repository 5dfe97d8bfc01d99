"""The fixed parts of a report: style sheet, skeleton, the question behind each verb and the glossary."""

ORDER = (
    "compare",
    "bench-train",
    "bench-forward",
    "gates",
    "ablate",
    "lens",
    "access",
    "sae",
    "judge",
    "sae-label",
    "categories",
    "flow",
    "reference",
    "reference-causal",
    "reference-development",
    "reference-scan",
    "eval",
    "retrieval",
    "doctor",
)
"""Sections in reading order; other verbs follow by name."""

QUESTIONS = {
    "gates": "Where, how strongly and how selectively do the gates let V1 in?",
    "ablate": "What does the model lose when a gate is replaced?",
    "lens": "From which depth is the next token readable, and where does one model overtake the other?",
    "access": "How much first-layer value reaches each layer, beside the layer's own?",
    "sae": "How well does a Top-K dictionary describe V1, and how much of that is memory?",
    "judge": "What is the judge's word worth: can it tell sets that belong together from shuffled ones?",
    "sae-label": "Which V1 latents survive the funnel, and what are they?",
    "categories": "Does the gate let some kinds of V1 features in more than others?",
    "flow": "Which V1 latents does each head re-read, and what do they do to the logits?",
    "reference": "On what do gates rest: a bias of their own, or their coupling to the mean the stream carries?",
    "reference-causal": "What happens to gates and predictions when the carried direction is changed?",
    "reference-development": "When in training do gates come to rest on the carried direction?",
    "reference-scan": "Do gates rest on the carried direction in other models too?",
    "compare": "Which model predicts best on the same tokens, and were they made alike?",
    "bench-train": "What does a training step cost in each architecture?",
    "bench-forward": "What does a forward pass cost in each architecture?",
    "eval": "How well does the model do on tasks, by the usual harness?",
    "retrieval": "Do gates matter more where an answer has to be retrieved from the context?",
    "doctor": "Can the measurements on this model be trusted?",
}

GLOSSARY = [
    ("V1", "the values that layer 0's attention computes; later layers may read them again"),
    (
        "alpha, the gate",
        "how much of V1 a layer adds to its own values, per position and KV head; 1 adds V1 once",
    ),
    ("KV head", "one key and value head; several query heads may share it"),
    ("NLL", "negative log-likelihood of the true next token, in nats per token; lower is better"),
    ("PPL, perplexity", "exp of the mean NLL; lower is better"),
    ("delta", "changed model minus unchanged model, always on the same tokens; above 0 is a loss"),
    ("CV", "coefficient of variation: standard deviation over heads divided by their mean"),
    ("logit lens", "the final norm and unembedding applied to the residual stream of an earlier layer"),
    (
        "dictionary, latent, feature",
        "a Top-K sparse autoencoder on V1; one of its directions; a latent that passed the funnel and has a "
        "label",
    ),
    (
        "FVE",
        "fraction of variance explained: 1 - sum of squared errors / sum of squared distances from the mean, "
        "weighted by how often each token occurs (or by type, where it says so)",
    ),
    ("L0", "active latents per position"),
    ("dead latent", "one that is active on no token of the counted text"),
    ("token type", "one entry of the vocabulary, however often it occurs"),
    (
        "MonoScore",
        "activation-weighted mean cosine similarity between the centred embeddings of a latent's top tokens",
    ),
    ("judge", "what scores token sets from 0 to 10 and names their category; worth only its calibration"),
    ("placebo", "tokens shuffled among latents: a judge that accepts them would accept anything"),
    (
        "interval [low, high]",
        "95 % percentile bootstrap over documents: where the number would fall with other documents of the "
        "same kind. It says nothing about training the model again. Without two documents there is no "
        "interval. Where a caption says so, features or token sets are drawn again instead, or as well",
    ),
]

STYLE = """
:root{--ink:#1f2430;--muted:#5c6370;--line:#dfe2e8;--accent:#08519c;--soft:#f6f7f9}
*{box-sizing:border-box}
body{margin:0;color:var(--ink);background:#fff;font:16px/1.55 'Helvetica Neue',Helvetica,Arial,sans-serif}
main{max-width:1140px;margin:0 auto;padding:1.5rem 1rem 4rem}
h1{font-size:1.7rem;line-height:1.2;margin:0 0 .5rem}
h2{font-size:1.35rem;margin:3rem 0 .3rem;padding-top:1rem;border-top:2px solid var(--line)}
h3{font-size:1.05rem;margin:1.6rem 0 .4rem}
p{max-width:48rem;margin:.4rem 0}
a{color:var(--accent)}
.muted{color:var(--muted)}
nav ul{padding-left:1.2rem;margin:.3rem 0}
figure{margin:1.5rem 0 2rem}
.plot{overflow-x:auto;border:1px solid var(--line);border-radius:6px;background:#fff}
.plot img{display:block;max-width:none}
figcaption{max-width:48rem;margin-top:.5rem;font-size:.92rem;color:var(--muted)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.9rem;margin:.4rem 0;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:.28rem .8rem .28rem 0;border-bottom:1px solid var(--line)}
td.n{text-align:right}
code{font:.85em/1.5 ui-monospace,Menlo,Consolas,monospace;overflow-wrap:anywhere}
details{margin:.8rem 0;padding:.5rem .8rem;background:var(--soft);border-radius:6px}
summary{cursor:pointer;font-weight:600}
dt{font-weight:600;margin-top:.5rem}dd{margin:0;max-width:48rem}
.alert{border-left:4px solid #a32035;padding-left:.7rem}
@media print{details{display:none}}
"""

DRAW = """
for (const holder of document.querySelectorAll('[data-figure]')) {
  const figure = JSON.parse(document.getElementById(holder.dataset.figure).textContent);
  Plotly.newPlot(holder, figure.data, figure.layout, {displaylogo: false});
}
"""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data: blob:; \
style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
{library}
</head>
<body>
<main>
<h1>{title}</h1>
{intro}
<nav aria-label="Runs"><ul>
{contents}
</ul></nav>
{sections}
<h2 id="how-to-read">How to read this page</h2>
<dl>
{glossary}
</dl>
</main>
{script}
</body>
</html>
"""
