"""Every exception this package raises on purpose.

    KimiK3Error
    ├── ConfigError          config.json is incomplete, unsupported or contradicts itself
    ├── CheckpointError      tensors or files do not fit the config
    │   ├── MissingShardError     a shard named by the index is not there
    │   ├── TruncatedShardError   a shard is shorter than its header says
    │   ├── ChangedShardError     a shard changed after it was opened
    │   └── ForeignCheckpointError  a format that belongs to another tool
    ├── TokenizerError       tokenizer files are missing, damaged or of another model
    ├── ChatError            a conversation cannot be rendered
    ├── MixError             a mix of corpora is incomplete or contradicts itself
    ├── SamplesError         text cannot be made into samples, or their file is damaged
    │   ├── ShortCorpusError      a corpus has fewer tokens than its share asks for
    │   └── OverlapError          samples hold documents that they must not hold
    ├── CalibrationError     a calibration cannot start, or cannot go on
    │   └── PartialResultError    kept results of one are damaged or belong to another
    ├── SaliencyError        what a calibration recorded is empty, damaged or asked wrongly
    ├── PlanError            a plan cannot be made, is damaged or does not fit the model
    ├── ConversionError      a conversion cannot start, or cannot go on
    ├── EvaluationError      what is to be judged cannot be, or not against this
    ├── MissingPackageError  a package that is needed only for this is not installed
    ├── RegistrationError    the host library cannot be served
    ├── DistributedError     a model cannot be split over this many ranks
    ├── NotFiniteError       a layer gives NaN or infinity
    └── ScratchError         a run's own files cannot be written or do not fit
        └── DamagedScratchError   they are not as they were written

All derive from ``ValueError`` too, which is what mlx-lm and mlx-vlm expect a
loader to raise.
"""


class KimiK3Error(ValueError):
    """Base of all errors of this package."""


class ConfigError(KimiK3Error):
    """``config.json`` is incomplete, unsupported or contradicts itself."""


class CheckpointError(KimiK3Error):
    """Tensors or files of a checkpoint do not fit its config."""


class MissingShardError(CheckpointError):
    """A shard named by the index is not there."""


class TruncatedShardError(CheckpointError):
    """A shard is shorter (or longer) than its header describes."""


class ChangedShardError(CheckpointError):
    """A shard changed after it was opened."""


class ForeignCheckpointError(CheckpointError):
    """The folder holds a format that belongs to another tool."""


class TokenizerError(KimiK3Error):
    """Tokenizer files are missing, damaged or belong to another model."""


class ChatError(KimiK3Error):
    """A conversation cannot be rendered."""


class CalibrationError(KimiK3Error):
    """A calibration cannot start, or cannot go on."""


class PartialResultError(CalibrationError):
    """Kept results of a calibration are damaged, or belong to another one."""


class SaliencyError(KimiK3Error):
    """What a calibration recorded is empty or damaged, or is asked for what it lacks."""


class PlanError(KimiK3Error):
    """A plan cannot be made, is damaged, or does not fit the model."""


class ConversionError(KimiK3Error):
    """A conversion cannot start, or cannot go on."""


class EvaluationError(KimiK3Error):
    """What is to be judged cannot be, or cannot be compared with this."""


class MissingPackageError(KimiK3Error):
    """A package that only this function needs is not installed."""


class MixError(KimiK3Error):
    """The description of a mix of corpora is incomplete or contradicts itself."""


class SamplesError(KimiK3Error):
    """Text cannot be made into samples, or a file of samples is damaged."""


class ShortCorpusError(SamplesError):
    """A corpus has fewer tokens than its share of the samples asks for."""


class OverlapError(SamplesError):
    """Samples hold documents that they must not have in common with others."""


class RegistrationError(KimiK3Error):
    """The host library cannot be served by this package."""


class DistributedError(KimiK3Error):
    """The model cannot be split over this many ranks."""


class NotFiniteError(KimiK3Error):
    """A layer gives NaN or infinity."""


class ScratchError(KimiK3Error):
    """Files that a run keeps for itself cannot be written, or do not fit it."""


class DamagedScratchError(ScratchError):
    """Files that a run kept for itself are not as they were written."""


class UnknownKeyWarning(UserWarning):
    """``config.json`` holds a key that this package does not know."""
