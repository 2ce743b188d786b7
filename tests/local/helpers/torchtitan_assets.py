"""A tokenizer and a dataset for torchtitan, made of a module of Python's own."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOKENS = 500
"""Fewer than the model of `torchtitan_on_cpu` has room for."""


def make_assets(folder: Path) -> Path:
    """Write them into `folder` / `tokenizer` and `data`; return the folder."""
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "data").mkdir()
    source = Path(sysconfig.get_path("stdlib")) / "argparse.py"
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train([str(source)], trainer)
    made.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(SPECIAL))
    text = source.read_text(encoding="utf-8")
    with (folder / "data" / "data.json").open("w", encoding="utf-8") as data:
        for start in range(0, len(text), 600):
            data.write(json.dumps({"text": text[start : start + 600]}) + "\n")
    return folder
