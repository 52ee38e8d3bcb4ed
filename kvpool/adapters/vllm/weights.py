"""What connector and tier share: a log, and what tells one model's weights from another's without reading all."""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

log = logging.getLogger("vllm.kvpool")
SAMPLE = 1 << 16  # bytes that are read at each of 16 places of a file
WEIGHTS = {".safetensors", ".bin", ".gguf", ".pt", ".pth", ".tensors"}


def sampled(model: str) -> str:
    """A digest of names, sizes and samples of the files of weights: those of a folder, or the file. Of none, ''."""
    path, digest = Path(model), hashlib.sha256()
    there = path.iterdir() if path.is_dir() else [path]
    files = sorted(each for each in there if each.suffix in WEIGHTS and each.is_file())
    for each in files:
        nbytes = each.stat().st_size
        digest.update(f"{each.name} {nbytes} ".encode())
        with each.open("rb") as file:
            for place in range(0, nbytes, max(SAMPLE, -(-nbytes // 16))):
                file.seek(place)
                digest.update(file.read(SAMPLE))
    return digest.hexdigest() if files else ""


def fingerprint(model_config: Any) -> str:
    """What tells this model from others: its config, and the commit of the hub or samples of its files."""
    config = model_config.hf_config.to_dict()
    commit = config.pop("_commit_hash", None) or model_config.revision
    told = {name: value for name, value in config.items() if name not in {"_name_or_path", "transformers_version"}}
    digest = hashlib.sha256(json.dumps([told, model_config.quantization], sort_keys=True, default=str).encode())
    return f"{sampled(model_config.model) or (model_config.model, commit)} {digest.hexdigest()}"
