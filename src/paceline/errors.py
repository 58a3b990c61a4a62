"""The errors that paceline raises on purpose: each is one sentence that says what is wrong and what to do."""


class PacelineError(Exception):
    """Base of every error raised on purpose."""


class OptionError(PacelineError, ValueError):
    """An option is unknown, out of range, or excludes another one."""


class RequestError(PacelineError, ValueError):
    """A request cannot be served as it stands."""


class ContextLengthError(RequestError):
    """The prompt, or the prompt and the tokens asked for, do not fit the context."""


class ModelError(PacelineError):
    """A model cannot be loaded."""


class UnsupportedModelError(ModelError):
    """The model needs something that paceline does not have."""


class WeightsError(ModelError):
    """A file of weights is missing, broken, cut, or does not fit its configuration."""


class HubError(ModelError):
    """A model cannot be fetched."""


class TokenizerError(ModelError):
    """A tokenizer or chat template is missing, broken, or unknown."""


class ResourceError(PacelineError):
    """Memory or disk does not suffice; the message has the needed and the free amount."""


class OverloadedError(ResourceError):
    """Too much is asked for at once; the same request may be served later."""


class DrafterError(PacelineError):
    """A drafter does not fit its target, or its options do not make sense."""


class KernelError(PacelineError):
    """The C kernels cannot be built or loaded."""


class ClosedError(PacelineError):
    """The model was closed, or belongs to another process."""
