"""A small SkyPilot catalog: the machines that exist and their prices, without internet.

SkyPilot downloads these tables, but never over a file that has no checksum beside it. The prices
are of one day; tests compare only their order.
"""

import csv
from collections.abc import Iterable
from pathlib import Path

_VERSION = "v8"
_MEMORY_MIB = {
    "A10": 24576,
    "A100": 40960,
    "A100-80GB": 81920,
    "H100": 81920,
    "H100-SXM": 81920,
    "H200": 144384,
    "H200-SXM": 144384,
    "L4": 24576,
    "L40S": 49152,
    "RTX4090": 24576,
    "B200": 196608,
}
_CLOUDS = str(["Lambda", "RunPod", "Vast", "Slurm", "Kubernetes"])
LAMBDA_REGIONS = ("us-east-1", "us-west-1", "us-south-1")
_LAMBDA_CPU = "cpu_4x_general"
# Name: accelerator, count, cores, memory in GiB, dollars per hour.
LAMBDA_MACHINES = {
    _LAMBDA_CPU: ("", 0, 4, 16, 0.20),
    "gpu_1x_a10": ("A10", 1, 30, 200, 0.75),
    "gpu_1x_h100_pcie": ("H100", 1, 26, 200, 2.49),
    "gpu_8x_h100_sxm5": ("H100", 8, 208, 1800, 23.92),
    "gpu_8x_a100_80gb_sxm4": ("A100-80GB", 8, 240, 1800, 14.32),
}
# Accelerator: dollars per hour and GPU.
_RUNPOD = {"H100-SXM": 2.69, "H200-SXM": 3.59, "A100-80GB": 1.19, "L4": 0.44}
_VAST = {"H100": 1.87, "H200": 2.40, "A100": 0.80, "RTX4090": 0.35}
_COUNTS = (1, 2, 4, 8)

Row = dict[str, object]


def write_catalog(home: Path) -> None:
    """Write the tables below `home`, which is SkyPilot's `~`."""
    folder = home / ".sky/catalogs" / _VERSION
    gpus: list[Row] = [{"AcceleratorName": name, "Clouds": _CLOUDS} for name in _MEMORY_MIB]
    _write(folder / "common/accelerators.csv", gpus)
    _write(folder / "common/metadata.csv", map(_metadata, _MEMORY_MIB))
    _write(folder / "lambda/vms.csv", _lambda_rows())
    _write(folder / "runpod/vms.csv", _runpod_rows())
    _write(folder / "vast/vms.csv", _vast_rows())


def _metadata(gpu: str) -> Row:
    return {"GPU": gpu, "MemoryGB": _MEMORY_MIB[gpu] // 1024, "Manufacturer": "NVIDIA"}


def _lambda_rows() -> list[Row]:
    return [
        {
            **_machine(name, gpu, count, float(cores), float(memory)),
            "Price": price,
            "Region": region,
            "SpotPrice": "",
        }
        for region in LAMBDA_REGIONS
        for name, (gpu, count, cores, memory, price) in LAMBDA_MACHINES.items()
    ]


def _runpod_rows() -> list[Row]:
    return [
        {
            **_machine(f"{count}x_{gpu}_SECURE", gpu, count, 16.0 * count, 125.0 * count),
            "Region": "US",
            "SpotPrice": round(price * count * 0.6, 2),
            "Price": round(price * count, 2),
            "AvailabilityZone": zone,
        }
        for zone in ("US-KS-2", "US-CA-2")
        for gpu, price in _RUNPOD.items()
        for count in _COUNTS
    ]


def _vast_rows() -> list[Row]:
    return [
        {
            **_machine(f"{count}x-{gpu}-32-{65536 * count}", gpu, count, 32.0, 64.0 * count),
            "Price": round(price * count, 2),
            "Region": "US",
            "SpotPrice": round(price * count * 0.5, 2),
            "HostingType": 1,
        }
        for gpu, price in _VAST.items()
        for count in _COUNTS
    ]


def _machine(name: str, gpu: str, count: int, cores: float, memory_gib: float) -> Row:
    return {
        "InstanceType": name,
        "AcceleratorName": gpu,
        "AcceleratorCount": float(count) if gpu else "",
        "vCPUs": cores,
        "MemoryGiB": memory_gib,
        "GpuInfo": _gpu_info(gpu, count) if gpu else "",
    }


def _gpu_info(gpu: str, count: int) -> str:
    mib = _MEMORY_MIB[gpu]
    model = {"Name": gpu, "Manufacturer": "NVIDIA", "Count": float(count)}
    gpus = [{**model, "MemoryInfo": {"SizeInMiB": mib}}]
    return str({"Gpus": gpus, "TotalGpuMemoryInMiB": mib * count})


def _write(path: Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    all_rows = list(rows)
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, fieldnames=list(all_rows[0]))
        table.writeheader()
        table.writerows(all_rows)
