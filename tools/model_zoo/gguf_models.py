"""Conversion of a model from GGUF, llama.cpp's format, to Hugging Face's layout."""

from pathlib import Path
from typing import Any


def convert_gguf(folder: Path) -> None:
    """Replace the only file of a folder by its weights, config, tokenizer and chat template.

    Quantised weights are written out in bfloat16, as they were published before."""
    # They take seconds to import, and a zoo that is whole needs none of them.
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    [file] = folder.iterdir()
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(folder),
        gguf_file=file.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), gguf_file=file.name)
    # SmolLM's: transformers ignores the file's `tokenizer.ggml.pre`, and would read every
    # vocabulary as GPT-2's.
    words = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.backend_tokenizer.pre_tokenizer = words
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    file.unlink()
