"""A rehearsal of `train.py` on one machine: a job of two processes loses one, is preempted, and ends on one process.

    python examples/distributed/rehearse.py            (or: make distributed)

1. Two processes with four virtual devices each train, and one of them is killed. The other ends with an error, and its
   last line says how to go on.
2. The job is started again on two processes, continues from its last checkpoint, and gets SIGTERM. Both processes save
   the same step and end.
3. The job is started again on one process with eight devices, and runs to its end.
4. A run without interruptions has the same losses.

The processes get the environment variables that SLURM would set.
"""

import argparse
import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np

HERE = pathlib.Path(__file__).parent
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--output", type=pathlib.Path, default=HERE.parent / "output/rehearsal")
parser.add_argument("--limit", type=float, default=240, help="seconds for each part")
parser.add_argument("--smoke", action="store_true", help="only parts 1 and 3, for the tests")
args = parser.parse_args()

SAVE_EVERY = 40  # many more steps than a job takes between the look at its log and the signal
DEVICES = 2 if args.smoke else 4  # virtual devices of each of two processes
job_ids = itertools.count(random.randrange(1, 4000))  # JAX computes its port from the number of the job


def start(output, steps, processes, devices):
    """Starts a job of several processes, as `srun` does."""
    job = next(job_ids)
    started = []
    for process in range(processes):
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            # The virtual devices of a process share a few threads. With several steps in flight, a collective of the
            # next step can occupy the threads that the collectives of this one are waiting for.
            "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false",
            "SLURM_JOB_ID": str(job),
            "SLURM_STEP_NODELIST": "127.0.0.1",
            "SLURM_NTASKS": str(processes),
            "SLURM_PROCID": str(process),
            "SLURM_LOCALID": str(process),
        }
        command = [sys.executable, HERE / "train.py", "--output", output, "--steps", steps, "--save-every", SAVE_EVERY]
        command += ["--smoke", "--heartbeat", 12] if args.smoke else ["--heartbeat", 20]
        started.append(subprocess.Popen(list(map(str, command)), env=environment, stderr=subprocess.PIPE, text=True))
    return started


def finish(job):
    """Returns the exit codes of a job and what its processes wrote to standard error; leaves none running."""
    deadline = time.monotonic() + args.limit
    try:
        errors = [process.communicate(timeout=max(1.0, deadline - time.monotonic()))[1] for process in job]
    finally:
        for process in job:
            if process.poll() is None:
                process.kill()
                process.wait()
    return [process.returncode for process in job], errors


def logged(output):
    """Returns the losses that process 0 has logged so far, as pairs of step and loss."""
    path = output / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return [(record["step"], record["loss"]) for record in records if "loss" in record]


def wait_until(output, job, step):
    """Waits until a job has logged a step."""
    deadline = time.monotonic() + args.limit
    while not any(logged_step >= step for logged_step, _ in logged(output)):
        if time.monotonic() > deadline or any(process.poll() is not None for process in job):
            codes, errors = finish(job)
            sys.exit(f"the job did not reach step {step}; it ended with {codes}:\n" + "\n".join(errors)[-4000:])
        time.sleep(0.02)


output = args.output / "job"
shutil.rmtree(args.output, ignore_errors=True)
ENDLESS = 10**6

print("1. two processes train, and one is killed", flush=True)
job = start(output, ENDLESS, processes=2, devices=DEVICES)
wait_until(output, job, SAVE_EVERY + 5)
job[1].send_signal(signal.SIGKILL)
killed_at = time.monotonic()
codes, errors = finish(job)
# Where the loss of a connection is noticed, train.py sees an exception; else JAX aborts the process with its own words.
last_line = errors[0].rstrip().splitlines()[-1]
reasons = [line for line in errors[0].splitlines() if "process 0 of 2 ends" in line or "another task died" in line]
assert codes[0] != 0 and codes[1] == -signal.SIGKILL and reasons, (codes, errors)
assert f"it continues from the last checkpoint in {output}" in last_line, errors
print(f"   process 0 ended after {time.monotonic() - killed_at:.0f} s with exit code {codes[0]}: {reasons[-1]}")
print(f"   its last line: {last_line}")
before, last = logged(output), logged(output)[-1][0]

if not args.smoke:
    print("2. two processes continue, and get SIGTERM", flush=True)
    job = start(output, ENDLESS, processes=2, devices=DEVICES)
    last += 25
    wait_until(output, job, last)
    for process in job:
        process.send_signal(signal.SIGTERM)
    codes, errors = finish(job)
    assert codes == [128 + signal.SIGTERM] * 2, (codes, errors)
    last = logged(output)[-1][0]
    print(f"   both saved step {last + 1} and ended")

print("3. one process continues to the end", flush=True)
steps = last + (5 if args.smoke else 20)
codes, errors = finish(start(output, steps, processes=1, devices=2 * DEVICES))
assert codes == [0], errors

after = logged(output)[len(before) :]
assert after[0][0] % SAVE_EVERY == 0 and after[0][0] >= SAVE_EVERY, "it did not start from a checkpoint"
assert after[-1][0] == steps - 1
known = dict(before)
again = [(step, known[step], loss) for step, loss in after if step in known]  # trained twice: before and after the kill
# There are none if the signal arrived just after a checkpoint was saved, which nobody can time.
difference = max((abs(loss - old) / old for _, old, loss in again), default=0.0)
assert difference < 1e-3, again
assert np.mean([loss for _, loss in after[-5:]]) < 0.9 * before[0][1]
print(
    f"   {len(again)} steps ran before and after the kill; their losses differ by at most {difference:.1e}, relatively"
)

if not args.smoke:
    print("4. one process without interruptions", flush=True)
    codes, errors = finish(start(args.output / "reference", steps, processes=1, devices=2 * DEVICES))
    assert codes == [0], errors
    reference, found = dict(logged(args.output / "reference")), dict(logged(output))
    assert sorted(found) == sorted(reference) == list(range(steps))
    difference = max(abs(found[step] - reference[step]) / reference[step] for step in found)
    assert difference < 1e-2, difference
    print(f"   the losses of all {steps} steps differ by at most {difference:.1e}, relatively")

print(f"final loss: {after[-1][1]:.3f}")
