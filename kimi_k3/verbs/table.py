"""Every verb of ``kimi-k3``, in the order in which the help lists them."""

from . import bench, demo, doctor, run, samples, verify

VERBS = {
    "demo": demo.VERB,
    "run": run.VERB,
    "verify": verify.VERB,
    "samples": samples.VERB,
    "bench": bench.VERB,
    "doctor": doctor.VERB,
}
