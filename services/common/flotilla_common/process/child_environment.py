"""The environment of child processes: allowed variables only.

All code that starts a process uses it (tests/common/test_process_starts.py): a variable that is
not listed here never reaches a child."""

import os
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import cache

from flotilla_common.text.redaction import is_secret_name, secret_values

# What any program needs to find its files, its language and its way out of a network.
_ANYBODY = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "COLUMNS", "NO_COLOR", "FORCE_COLOR"),
    *("LANG", "LANGUAGE", "LC_*", "TZ", "TZDIR", "TMPDIR", "TEMP", "TMP", "XDG_*"),
    *(f"{scheme}_PROXY" for scheme in ("HTTP", "HTTPS", "FTP", "ALL", "NO")),
    *(f"{scheme}_proxy" for scheme in ("http", "https", "ftp", "all", "no")),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("NODE_EXTRA_CA_CERTS", "AWS_CA_BUNDLE", "GIT_SSL_CAINFO", "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"),
    *("LD_LIBRARY_PATH", "PYTHON*", "VIRTUAL_ENV", "CONDA_*"),
    # Without these a process would see devices of other processes.
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    "ROCR_VISIBLE_DEVICES",
    # Our own switches, and the mark by which the launcher finds the processes of a replica.
    "FLOTILLA_*",
)
# Further variables that our services and ranks read: drivers, numerical and transport libraries,
# kernel compilers, schedulers.
_OURS = (
    *("GRPC_*", "LD_*", "MALLOC_*", "SLURM*", "SKYPILOT_*", "RAY_*", "XLA_*"),
    *("CUDA*", "CUBLAS*", "CUDNN*", "CUTLASS*", "NV*", "NCCL_*", "TRITON_*", "TORCH*", "PYTORCH_*"),
    *("VLLM_*", "FLASH*", "XFORMERS_*", "HF_*", "HUGGINGFACE_*", "TRANSFORMERS_*", "TOKENIZERS_*"),
    *("SAFETENSORS_*", "DATASETS_*", "ACCELERATE_*", "OMP_*", "GOMP_*", "KMP_*", "MKL_*", "DNNL_*"),
    *("ONEDNN_*", "OPENBLAS_*", "NUMEXPR_*", "NUMBA_*", "BLIS_*", "GLOO_*", "UCX_*", "UCC_*"),
    *("FI_*", "OFI_*", "EFA_*", "RDMAV_*", "IBV_*", "MLX*", "MPI_*", "OMPI_*", "PMI_*", "PMIX_*"),
    *("ROC*", "HIP_*", "HSA_*", "AMD_*", "MIOPEN_*", "RCCL_*", "ONEAPI_*", "ZE_*", "SYCL_*"),
    *("CC", "CXX", "CPATH", "LIBRARY_PATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "MAX_JOBS"),
)


def child_environment(
    *also: str, ours: bool = False, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the part of `environ` that a child gets; the default is this process's environment.

    `ours` marks a process of this project, and adds what engines and ranks read. `also` names
    further variables for this child, including secrets; `NAME_*` matches by prefix."""
    given = os.environ if environ is None else environ
    common = _compile_names((*_ANYBODY, *_OURS) if ours else _ANYBODY)
    named = _compile_names(also)
    return {
        name: value
        for name, value in given.items()
        if named.fullmatch(name) or (common.fullmatch(name) and not _is_secret(name, value))
    }


@contextmanager
def seen_by_children(*also: str) -> Generator[None]:
    """Reduce this process's own environment to `child_environment(*also)` during the block, for a
    library that starts a process with all of it. Other threads are affected too: use it only before
    any of them reads a variable."""
    kept = child_environment(*also)
    hidden = {name: value for name, value in os.environ.items() if name not in kept}
    try:
        for name in hidden:
            del os.environ[name]
        yield
    finally:
        os.environ.update(hidden)


@cache
def _compile_names(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(name).replace(r"\*", ".*") for name in names) or r"(?!)")


def _is_secret(name: str, value: str) -> bool:
    """Judge a variable by its name and its value.

    The path of a file that holds a secret is not secret, nor is a number of tokens."""
    return is_secret_name(name) and bool(secret_values({name: value}))
