"""One offline page from finished runs: it reads run directories and nothing else, no model and no network."""

from satlens.report.page import assemble

__all__ = ["assemble"]
