"""Forks one script from a zygote, as the supervisor does, and prints how it ended. Argument: a JSON object."""

import json
import os
import sys

from leto_strategy.processes.loop import Loop
from leto_strategy.processes.messages import LaunchSpec, Script
from leto_strategy.processes.starting import ZygoteClient
from leto_strategy.processes.timings import Timings
from leto_strategy.system import become_subreaper


def main():
    plan = json.loads(sys.argv[1])
    become_subreaper()
    loop = Loop()
    null = os.open(os.devnull, os.O_RDWR)
    script = Script(**{**plan["script"], "argv": tuple(plan["script"]["argv"])})
    spec = LaunchSpec("job", tuple(plan["argv"]), dict(os.environ), plan["cwd"], 1, 0, "fit", script=script)
    object.__setattr__(spec, "zygote_modules", tuple(plan.get("modules", ())))
    result = {"statuses": []}

    def ended(status):
        result["statuses"].append(str(status))
        if len(result["statuses"]) == plan["count"]:
            client.close()

    def appeared(pid):
        if pid is None:
            loop.stop()
        else:
            loop.own(pid, ended)

    def ready():
        for k in range(plan["count"]):
            env = {**os.environ, "FACTS_FILE": f"{plan['facts']}.{k}"}
            client.fork(env=env, fds=[null, 1, 2], targets=[0, 1, 2], callback=appeared)

    def failed(reason):
        result["failed"] = reason
        loop.stop()

    client = ZygoteClient(
        loop, spec, timings=Timings(), env=dict(os.environ), stdio=(null, 1, 2), on_ready=ready, on_failed=failed
    )
    loop.on_reaped = lambda pid: loop.stop() if pid == client.pid else None
    loop.run()
    print(json.dumps(result), file=sys.__stdout__)


main()
