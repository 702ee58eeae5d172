"""Every verb of ``kimi-k3``, in the order in which the help lists them."""

from . import (
    bench,
    calibrate,
    compare,
    convert,
    damage,
    demo,
    doctor,
    evaluate,
    generation,
    plan,
    run,
    saliency,
    samples,
    teacher,
    verify,
)

VERBS = {
    "demo": demo.VERB,
    "run": run.VERB,
    "verify": verify.VERB,
    "samples": samples.VERB,
    "calibrate": calibrate.VERB,
    "saliency": saliency.VERB,
    "damage": damage.VERB,
    "plan": plan.VERB,
    "convert": convert.VERB,
    "compare": compare.VERB,
    "teacher": teacher.VERB,
    "evaluate": evaluate.VERB,
    "generation": generation.VERB,
    "bench": bench.VERB,
    "doctor": doctor.VERB,
}
