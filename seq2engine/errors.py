"""Every failure a user can cause, as one sentence: what is wrong, what was expected, what to run next."""


class Seq2EngineError(Exception):
    """Base of all errors this package raises on purpose; the CLI prints them as one line and exits with 1."""


class UsageError(Seq2EngineError):
    """Options that cannot work whatever is in the files they name; the CLI exits with 2."""


class ConfigError(Seq2EngineError):
    """A model config or an option set that cannot work; the message lists every problem found."""


class CheckpointError(Seq2EngineError):
    """A checkpoint folder that is missing, damaged or of another kind."""


class ExportError(Seq2EngineError):
    """A graph that does not keep the contract."""


class BundleError(Seq2EngineError):
    """A bundle folder that is missing, damaged, of another version or already there."""


class BuildError(Seq2EngineError):
    """A TensorRT build that cannot start or did not finish."""


class SessionError(Seq2EngineError):
    """A backend that cannot be opened on this machine."""


class RequestError(Seq2EngineError):
    """Sources or shapes that the opened model does not accept."""
