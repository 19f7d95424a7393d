"""The environment of child processes: the variables that are allowed, and no more.

Everything that starts a process takes it from here (tests/common/test_process_starts.py): a
variable that nobody has thought of stays where it is."""

import os
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import cache

from services.common.redaction import is_secret_name, secret_values

# What any program needs to find its files, its language and its way out of a network.
_ANYBODY = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "COLUMNS", "NO_COLOR", "FORCE_COLOR"),
    *("LANG", "LANGUAGE", "LC_*", "TZ", "TZDIR", "TMPDIR", "TEMP", "TMP", "XDG_*"),
    *(f"{scheme}_PROXY" for scheme in ("HTTP", "HTTPS", "FTP", "ALL", "NO")),
    *(f"{scheme}_proxy" for scheme in ("http", "https", "ftp", "all", "no")),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("NODE_EXTRA_CA_CERTS", "AWS_CA_BUNDLE", "GIT_SSL_CAINFO", "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"),
    *("LD_LIBRARY_PATH", "PYTHON*", "VIRTUAL_ENV", "CONDA_*"),
    # Without them a process would see devices that are another's.
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    "ROCR_VISIBLE_DEVICES",
    # Our own switches, and the mark by which the launcher finds whatever a replica has started.
    "FLOTILLA_*",
)
# What our own services and ranks read besides: drivers, libraries of numbers and of transport,
# compilers of kernels, schedulers.
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

    `ours` is for a process of this project, and adds what engines and ranks read. `also` names
    variables that this child has a use for, secrets among them; `NAME_*` is all that begin so."""
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
    """Have this process's own environment be `child_environment(*also)`, around a library that
    starts a process with all of it. Other threads see that too: for what happens before there is
    anything that reads a variable."""
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

    The path of a file that holds a secret is none, and neither is a number of tokens."""
    return is_secret_name(name) and bool(secret_values({name: value}))
