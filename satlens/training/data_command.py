"""Turn documents into token files a model can be trained and measured on: `satlens data build`.

Examples:
    satlens data build --sources texts/ --out data/ --vocab-size 8192
    satlens data build --sources hf:HuggingFaceFW/fineweb-edu@sample-100BT --tokenizer path/to/llama-2-tokenizer \\
        --tokens 5100000000 --out data/fineweb
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from satlens.training.data import DataConfig, build_data


@dataclass(frozen=True, kw_only=True)
class Config(DataConfig):
    """Flags of `satlens data`."""

    job: tyro.conf.Positional[Literal["build"]]
    """What to do: build."""


def run(config: Config) -> Path:
    """Build the data; returns the folder."""
    return build_data(config)
