"""One small row, written by hand, in the shape of each public trajectory set, and the same row in our own form."""

import json

U = {"role": "user", "content": "fix f"}
S = {"role": "system", "content": "be brief"}
BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {
    "command": {"type": "string"}}}}}


def call(name, **arguments):
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def done(role="assistant", **fields):
    return {"role": role, "content": "done", **fields}


LOOK = {"role": "assistant", "content": "look", "tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}]}
SAW = {"role": "tool", "content": "a.py"}
SAW_AS_USER = {"role": "user", "content": "OBSERVATION:\na.py"}
TICKS = "I look.\n\n```bash\nls\n```"
TAGS = "I look.\n<function=bash>\n<parameter=command>ls</parameter>\n</function>"

ROWS = {  # set -> (its row, our row, the text the model learns to say, turn by turn)
    "nebius/SWE-rebench-openhands-trajectories": (
        {"trajectory_id": "chatcmpl-1", "instance_id": "o__r-1", "repo": "o/r", "model_patch": "diff", "resolved": 1,
         "exit_status": "submit", "gen_tests_correct": None, "pred_passes_gen_tests": 0.5, "tools": [BASH],
         "trajectory": [
            {**S, "tool_calls": None, "name": None, "tool_call_id": None},
            {**U, "tool_calls": None, "name": None, "tool_call_id": None},
            {"role": "assistant", "content": "look", "tool_calls": [call("bash", command="ls")], "name": None,
             "tool_call_id": None},
            {"role": "tool", "content": "a.py", "tool_calls": None, "name": "bash", "tool_call_id": "c1"},
            done(tool_calls=None, name=None, tool_call_id=None)]},
        {"messages": [S, U, LOOK, SAW, done()], "tools": [BASH]}, ["look", "done"]),
    "nvidia/SWE-Zero-openhands-trajectories": (
        {"instance_id": "o__r-1", "repo": "o/r", "license": "MIT", "trajectory_id": "t1", "model_patch": "",
         "dataset": "d", "trajectory": [
            S, U, {"role": "assistant", "content": None, "tool_calls": [call("finish", message="ok")]}]},
        {"messages": [S, U, {"role": "assistant", "content": "", "tool_calls": [
            {"name": "finish", "arguments": {"message": "ok"}}]}]}, ["finish"]),
    "SWE-bench/SWE-smith-trajectories, tool": (
        {"instance_id": "o__r.1", "resolved": True, "model": "m", "traj_id": "o__r.1.abc", "patch": "diff",
         "messages": json.dumps([
            {**S, "agent": "main", "message_type": "system_prompt"},
            {"role": "user", "content": [{"type": "text", "text": "fix f"}], "agent": "main"},
            {"role": "assistant", "content": "look", "thought": "look", "action": "ls", "agent": "main",
             "tool_calls": [{**call("bash", command="ls"), "index": 1}]},
            {"role": "tool", "content": [{"type": "text", "text": "a.py", "cache_control": {"type": "ephemeral"}}],
             "tool_call_ids": ["c1"], "agent": "main"},
            {"role": "assistant", "content": json.dumps([{"type": "text", "text": "done"}]), "tool_calls": None}])},
        {"messages": [S, U, LOOK, SAW, done()]}, ["look", "done"]),
    "SWE-bench/SWE-smith-trajectories, xml": (
        {"instance_id": "o__r.1", "resolved": False, "model": "m", "traj_id": "o__r.1.abc", "patch": "diff",
         "messages": [S, U, {"role": "assistant", "content": TAGS}, SAW_AS_USER, done()]},
        {"messages": [S, U, {"role": "assistant", "content": TAGS}, SAW_AS_USER, done()]},
        [TAGS, "done"]),
    "SWE-bench/SWE-smith-trajectories, ticks": (
        {"instance_id": "o__r.1", "resolved": True, "model": "m", "traj_id": "o__r.1.abc", "patch": "diff",
         "messages": [S, U, {"role": "assistant", "content": TICKS}]},
        {"messages": [S, U, {"role": "assistant", "content": TICKS}]}, [TICKS]),
    "SWE-Gym/OpenHands-Sampled-Trajectories": (
        {"messages": [S, U, {"role": "assistant", "content": "look", "tool_calls": [call("bash", command="ls")]},
                      {"role": "tool", "content": "a.py", "name": "bash", "tool_call_id": "c1"}, done()],
         "tools": json.dumps([BASH]), "instance_id": "o__r-1", "resolved": True, "run_id": "r"},
        {"messages": [S, U, LOOK, SAW, done()], "tools": [BASH]}, ["look", "done"]),
    "R2E-Gym/R2EGym-SFT-Trajectories": (
        {"messages": [S, U, {"role": "assistant", "content": TAGS}], "docker_image": "i"},
        {"messages": [S, U, {"role": "assistant", "content": TAGS}]}, [TAGS]),
    "R2E-Gym Trajectory objects": (
        {"problem_statement": "fix f", "docker_image": "i", "exit_reason": "agent", "output_patch": "diff",
         "reward": 1.0, "trajectory_steps": [
            {"step_idx": 0, "thought": "I look.", "action": "<function=bash>\n</function>", "observation": "a.py",
             "done": False},
            {"step_idx": 1, "thought": "", "action": "<function=finish>\n</function>", "observation": "",
             "done": True}]},
        {"messages": [U, {"role": "assistant", "content": "I look.\n\n<function=bash>\n</function>"},
                      {"role": "user", "content": "a.py"},
                      {"role": "assistant", "content": "<function=finish>\n</function>"},
                      {"role": "user", "content": ""}]},
        ["I look.\n\n<function=bash>\n</function>", "<function=finish>\n</function>"]),
    "nebius/SWE-agent-trajectories": (
        {"instance_id": "o__r-1", "model_name": "m", "target": True, "exit_status": "submitted",
         "generated_patch": "diff", "eval_logs": "ok", "trajectory": [
            {"role": "system", "text": None, "system_prompt": "be brief", "mask": False, "cutoff_date": "01.01.2023"},
            {"role": "user", "text": "fix f", "system_prompt": None, "mask": False, "cutoff_date": None},
            {"role": "ai", "text": "a demonstration", "system_prompt": None, "mask": False, "cutoff_date": None},
            {"role": "user", "text": "a.py", "system_prompt": None, "mask": False, "cutoff_date": None},
            {"role": "ai", "text": TICKS, "system_prompt": None, "mask": True, "cutoff_date": None}]},
        {"messages": [S, U, {"role": "assistant", "content": "a demonstration", "weight": 0},
                      {"role": "user", "content": "a.py"}, {"role": "assistant", "content": TICKS}]}, [TICKS]),
    "mini-swe-agent file": (
        {"info": {"exit_status": "Submitted", "submission": "diff"}, "trajectory_format": "mini-swe-agent-1.1",
         "messages": [
            {**S, "extra": {"cost": 0.0}}, U,
            {"role": "assistant", "content": "look", "tool_calls": [call("bash", command="ls")], "function_call": None,
             "extra": {"cost": 0.1}},
            {"role": "tool", "content": "a.py", "tool_call_id": "c1", "extra": {"returncode": 0}}, done(),
            {"role": "exit", "content": "diff"}]},
        {"messages": [S, U, LOOK, SAW, done()]}, ["look", "done"]),
    "Kwai SWE-smith-mini_swe_agent_plus-66k": (
        {"instance_id": "o__r-1", "messages": [S, U, {"role": "assistant", "content": TICKS}]},
        {"messages": [S, U, {"role": "assistant", "content": TICKS}]}, [TICKS]),
    "togethercomputer/CoderForge-Preview": (
        {"trajectory_id": "t1", "finish_reason": "stop", "image": "i", "reward": 1.0, "license": "MIT",
         "tools": json.dumps([BASH]), "messages": json.dumps([
            S, U, {"role": "assistant", "content": "look", "tool_calls": [call("bash", command="ls")]}, SAW, done()])},
        {"messages": [S, U, LOOK, SAW, done()], "tools": [BASH]}, ["look", "done"]),
    "nvidia/Nemotron-SWE-v1": (
        {"uuid": "u1", "license": "MIT", "used_in": ["x"], "dataset": "R2E-Gym/R2E-Gym-Subset", "repo": "o/r",
         "tools": [BASH], "messages": [S, U, {"role": "assistant", "content": "look", "reasoning_content": "hm",
                             "tool_calls": [call("bash", command="ls")]}, SAW, done()]},
        {"messages": [S, U, {**LOOK, "reasoning_content": "hm"}, SAW, done()], "tools": [BASH]},
        ["<think>\nhm\n</think>\n\nlook", "done"]),
    "nvidia/Nemotron-SFT-SWE-v3": (
        {"uuid": "u1", "license": "MIT", "messages": [S, U, done()]}, {"messages": [S, U, done()]}, ["done"]),
    "ShareGPT": (
        {"id": 3, "system": "be brief", "tools": json.dumps([BASH]), "conversations": [
            {"from": "human", "value": "fix f"},
            {"from": "function_call", "value": json.dumps({"name": "bash", "arguments": {"command": "ls"}})},
            {"from": "observation", "value": "a.py"}, {"from": "gpt", "value": "done"}]},
        {"messages": [S, U, {**LOOK, "content": None}, SAW, done()], "tools": [BASH]}, ["", "done"]),
    "chat in conversations": (
        {"conversations": [{"role": "human", "content": "fix f"}, done("gpt")]}, {"messages": [U, done()]}, ["done"]),
}
