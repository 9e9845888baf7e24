"""Every setting, with its default and help, as one frozen tree of sections. core/config.py reads it from a file and
the command line. A module takes its section, never the whole tree.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

STAGES = ("microswe", "pretrain", "coding-sft", "if-sft", "oprd", "rl", "rft", "eval", "all", "score", "export",
          "annotate", "if-data", "match-rules", "behaviours", "parse-log", "check-tasks", "plan", "microif",
          "checklists", "checklist-report")
FILES = {"input": ("score", "annotate", "if-data", "match-rules", "behaviours", "parse-log", "check-tasks",
                   "checklists", "checklist-report"),  # option of the command line: its stages
         "output": ("score", "export", "annotate", "if-data", "check-tasks", "checklists"),
         "parser": ("parse-log",)}
RESUMED = ("microswe", "pretrain", "coding-sft", "if-sft", "oprd", "rl", "rft", "all", "check-tasks")  # by --resume


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


class Run(Section):
    folder: str = Field("runs/micro", description="where everything of this run is written")
    ready: str = Field("", description="stage all: folder of ready models of the first stages (base, coding-sft, ...)")
    seed: int = Field(0, ge=0, lt=2**32, description="seeds data order, initial weights, sampling and MicroSWE")
    threads: int = Field(0, ge=0, le=4096, description="CPU threads of torch; 0 leaves torch's choice")
    precision: Literal["bf16", "fp32"] = Field("bf16", description="autocast type of training matrix products")


class Model(Section):
    path: str = Field("", description="Hugging Face folder to start from; empty: the stage before, under run.folder")
    hidden: int = Field(128, ge=8, description="width of a new random model (stage microswe)")
    layers: int = Field(4, ge=1, description="layers of a new random model")
    heads: int = Field(4, ge=1, description="query heads of a new random model")
    kv_heads: int = Field(2, ge=1, description="key/value heads of a new random model")
    head_dim: int = Field(32, ge=2, description="size of one head of a new random model")
    intermediate: int = Field(384, ge=8, description="SwiGLU width of a new random model")
    tied: bool = Field(True, description="whether a new random model shares embedding and output head")


class ChatSettings(Section):
    form: Literal["auto", "template", "qwen3_5", "qwen3_6", "qwen3", "qwen3_instruct", "qwen2_5", "bare"] = Field(
        "auto", description="how conversations are written: as the folder's template (auto, template) or a family's")
    thinking: bool = Field(False, description="whether replies begin with a think block")
    tools: bool = Field(True, description="whether the system message lists the tools' schemas, as Qwen's templates do")
    system: str = Field("Fix the bug.", description="system message of every conversation")


class MicroSWE(Section):
    vocabulary: int = Field(512, ge=300, description="entries of the byte-level BPE trained on the generated corpus")
    pretrain_texts: int = Field(6000, ge=1, description="plain texts for the pretraining of a base model")
    coding_tasks: int = Field(1200, ge=1, description="tasks the expert solves for Coding SFT")
    if_tasks: int = Field(600, ge=1, description="tasks on which scripted mistakes are made for IF SFT")
    careful: float = Field(0.25, ge=0, le=1, description="share of demonstrations that look at the failing test before "
                                                         "the edit, and share that validate after it")
    relabels: int = Field(8, ge=1, description="consistently renamed copies written for every recording")
    oprd_tasks: int = Field(4000, ge=1, description="tasks in the OPRD pool")
    validation_tasks: int = Field(128, ge=1, description="held-out tasks, with names no training task has")
    functions: int = Field(3, ge=2, le=5, description="functions in the wrong file, at most")
    branches: int = Field(3, ge=2, le=5, description="branches of a scenario function, at most")


class MicroIF(Section):
    sft_rows: int = Field(3000, ge=1, description="answers to imitate, and as many verifications")
    tasks: int = Field(1000, ge=1, description="prompts for --stage rl")
    validation_tasks: int = Field(128, ge=1, description="held-out prompts, with words no training row has")
    items: int = Field(4, ge=2, le=6, description="constraints of a prompt")
    quality: float = Field(0.7, ge=0, le=1, description="chance that an imitated answer meets a constraint")
    honesty: float = Field(0.8, ge=0, le=1, description="chance that an imitated verification is right")
    leniency: float = Field(0.7, ge=0, le=1, description="chance that one that is not made right says yes")


class Data(Section):
    world: Literal["repository", "prompts"] = Field("repository", description="tasks of rl and eval: repositories in "
                                                    "sandboxes, or prompts with one reply (MicroIF)")
    rows: str = Field("", description="rows (JSONL, Parquet, or a folder of them) of pretrain (text), coding-sft, "
                                      "if-sft (conversations); empty: MicroSWE's")
    tasks: str = Field("", description="task rows (JSONL) for oprd and eval; empty: MicroSWE's under run.folder")
    strict: bool = Field(True, description="a bad training row or task stops the run (true) or is skipped and counted")
    task_set: Literal["auto", "swe-rebench-v2", "multi-swe", "swe-bench", "swe-bench-pro", "swe-gym", "r2e"] = Field(
        "auto", description="the published set that the task rows are of; auto: told row by row")
    pro_scripts: str = Field("", description="SWE-bench Pro: the folder run_scripts of its harness")
    only_resolved: bool = Field(False, description="leave out rows whose mark (resolved, target, reward) says unsolved")
    max_tokens: int = Field(1024, ge=8, description="longest training row; longer texts (pretrain) are cut there")


class Train(Section):
    epochs: float = Field(1.0, gt=0, le=1e6, description="passes over the rows or tasks, unless steps is given")
    steps: int = Field(0, ge=0, le=10**9, description="optimizer steps; 0: from epochs")
    batch: int = Field(32, ge=1, le=10**6, description="examples (SFT) or attempts (OPRD) in one optimizer step")
    micro_batch_tokens: int = Field(16384, ge=16, description="most tokens in a forward, student and teacher together")
    lr: float = Field(1e-5, gt=0, description="peak learning rate")
    lr_start: float = Field(0.0, ge=0, description="learning rate at the start of warm-up")
    lr_min: float = Field(1e-6, ge=0, description="learning rate of the last step")
    warmup: float = Field(0.005, ge=0, lt=1, description="warm-up, as a share of all steps")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW")
    weight_decay: float = Field(0.0, ge=0, description="AdamW")
    router_balance: float = Field(0.001, ge=0, description="mixtures: weight of the router's load-balancing loss")
    clip: float = Field(1.0, gt=0, description="largest global gradient norm")
    checkpoint_every: int = Field(100, ge=1, description="optimizer steps between checkpoints")
    keep: int = Field(2, ge=1, description="checkpoints kept")


class Parallel(Section):
    dp: int = Field(0, ge=0, description="ranks that read different micro-batches; 0: what is left of the started ones")
    cp: int = Field(1, ge=1, description="ranks that share a micro-batch's tokens and exchange them for heads (Ulysses)")
    tp: int = Field(1, ge=1, description="ranks that share the weights of every layer, and its tokens between layers")
    ep: int = Field(1, ge=1, description="ranks that share the experts of every mixture; may lie across dp, cp and tp")
    zero: int = Field(1, ge=0, le=2, description="sharded over ranks with equal weights: 0 nothing, 1 the optimizer's "
                                                 "state, 2 its state and the gradients")
    weights: Literal["fp32", "bf16"] = Field("fp32", description="type of resident weights (the optimizer's are fp32)")
    recompute: bool = Field(False, description="keep only each layer's input for the backward pass, run it again there")
    offload: bool = Field(False, description="keep the optimizer's state in CPU memory")
    teacher_on_cpu: bool = Field(False, description="keep the teacher in CPU memory between optimizer steps")
    bucket_mib: int = Field(64, ge=1, description="gradients that travel together, in MiB of all ranks")
    async_save: bool = Field(False, description="go on training while a checkpoint is being written")
    timeout_s: float = Field(7200.0, gt=0, description="seconds a rank waits for the others (in rollouts: for the first)")


class PlanSettings(Section):
    stage: Literal["coding-sft", "if-sft", "oprd"] = Field("coding-sft", description="stage plan: whose step is planned")
    architecture: str = Field("", description="folder with the config.json to plan for; empty: the model's own folder")
    gpus: int = Field(1, ge=1, description="stage plan: ranks, a GPU each")
    gpus_per_node: int = Field(8, ge=1, description="stage plan: GPUs that the fast link joins")
    memory_gib: float = Field(96.0, gt=0, description="stage plan: memory of one GPU (96: H20)")
    reserved_gib: float = Field(6.0, ge=0, description="stage plan: of it, what the driver and fragmentation take")
    tflops: float = Field(148.0, gt=0, description="stage plan: dense bf16 rate of one GPU (148: H20)")
    link_gbs: float = Field(450.0, gt=0, description="stage plan: GB/s a GPU sends within a node")
    network_gbs: float = Field(50.0, gt=0, description="stage plan: GB/s a GPU sends to other nodes")


class Rollout(Section):
    engine: Literal["native", "sglang"] = Field("native", description="who samples: this program, or SGLang servers")
    workers: int = Field(32, ge=1, description="conversations open at once")
    verifiers: int = Field(2, ge=1, description="gradings at once")
    lockstep: bool = Field(True, description="batch turns in lock-step: reproducible to the bit, a little slower")
    temperature: float = Field(1.0, ge=0, description="sampling temperature; 0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling; 1 keeps all")
    max_turns: int = Field(12, ge=1, description="assistant turns of one attempt")
    max_turn_tokens: int = Field(160, ge=1, description="tokens of one reply")
    max_context_tokens: int = Field(1024, ge=16, description="tokens of one conversation")
    max_malformed: int = Field(2, ge=1, description="malformed replies in a row that end an attempt")
    attempt_s: float = Field(120.0, gt=0, description="seconds of wall clock for one attempt")
    record: Literal["text", "ids", "none"] = Field("text", description="what is kept of every attempt, under attempts/")
    max_staleness: int = Field(0, ge=0, description="versions that generation may run ahead of training")
    importance_clip: float = Field(2.0, gt=0, description="most that a token of older weights counts, by its ratio")
    check_attempts: int = Field(4, ge=0, description="attempts of a step whose log-probabilities are compared with the "
                                                     "trainer's (of stale ones: all)")
    difference_alarm: float = Field(0.05, ge=0, description="mean difference to the trainer's log-probabilities that "
                                                            "stops a run at its first step, warns later; 0: none")
    cache_tokens: int = Field(65536, ge=64, description="tokens the native engine keeps cached")


class SGLang(Section):
    servers: tuple[str, ...] = Field((), description="running servers, as http://host:30000; empty: they are started")
    count: int = Field(1, ge=1, description="servers to start")
    command: str = Field("launch/sglang.sh {model} {port}", description="what starts one")
    ready_s: float = Field(600.0, gt=0, description="seconds until a started server must answer")
    call_s: float = Field(30.0, gt=0, description="seconds for one control call")
    turn_s: float = Field(600.0, gt=0, description="seconds of wall clock for one turn")
    health_s: float = Field(10.0, gt=0, description="seconds between health checks, and for one")
    retries: int = Field(4, ge=0, description="failures of one turn that are borne")
    update: Literal["broadcast", "disk"] = Field("broadcast", description="how new weights get to the servers")
    backend: Literal["gloo", "nccl"] = Field("gloo", description="broadcast: of CPU (gloo) or GPU (nccl) memory")
    address: str = Field("", description="where servers find the trainer; empty: its address on the way to them")
    bucket_mib: int = Field(64, ge=1, description="size of one bucket of weights; two are in memory")
    update_s: float = Field(120.0, gt=0, description="seconds for any one step of an update")
    dtype: Literal["", "float32", "bfloat16"] = Field("", description="of the weights sent; empty: as the servers say")
    probe_tolerance: float = Field(0.0, ge=0, description="mean difference of log-probabilities to the trainer's that "
                                                          "an update may leave; 0: 1e-5 in float32, else 0.15")


class SandboxSettings(Section):
    kind: Literal["local", "docker"] = Field("local", description="local is no security boundary; docker is one")
    image: str = Field("", description="docker: the image of tasks that name none (MicroSWE's; needs python3 and git)")
    tools: Literal["micro", "coder"] = Field("micro", description="the agent's tools: MicroSWE's four, or eight for "
                                                                  "real repositories (docs/sandbox.md)")
    tests_s: float = Field(120.0, gt=0, description="seconds of wall clock for the hidden tests")
    command_s: float = Field(20.0, gt=0, description="seconds of wall clock for one command")
    memory_mib: int = Field(1024, ge=16, description="memory of one sandbox")
    file_mib: int = Field(64, ge=1, description="largest file a command may write")
    processes: int = Field(128, ge=8, description="processes (docker: and threads) of one sandbox")
    output_bytes: int = Field(4096, ge=64, description="bytes of a command's output an agent sees, head and tail")
    output_tokens: int = Field(16384, ge=64, description="tokens of a tool's answer an agent sees, head and tail")
    cpus: float = Field(1.0, gt=0, description="docker: cores of one sandbox")
    disk_mib: int = Field(0, ge=0, description="docker: what one sandbox may write in all; 0: no limit")
    network: str = Field("none", description="docker: none, or the name of an engine's network to join")
    hosts: tuple[str, ...] = Field((), description="docker: engines to spread over, as unix://..., tcp://host:port, "
                                                   "ssh://user@host; empty: DOCKER_HOST")
    mounts: tuple[str, ...] = Field((), description="docker: folders of the engine's machine, /outside:/inside, "
                                                    "always read-only")
    environment: tuple[str, ...] = Field((), description="docker: NAME=value in every sandbox, on top of the image's")
    pulls: int = Field(4, ge=0, description="docker: tries at an image the engine lacks; 0: it must be there")
    free_gib: float = Field(4.0, ge=0, description="docker: least free space on a local engine's disk")
    warm: int = Field(0, ge=0, description="docker: sandboxes kept ready ahead of need")

    @model_validator(mode="after")
    def _containers(self):
        if self.kind == "local":
            for name in ("cpus", "disk_mib", "network", "hosts", "mounts", "environment", "pulls", "free_gib", "warm"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"sandbox.{name} = {getattr(self, name)!r} means nothing to sandbox.kind local; "
                                     "use docker")
        for mount in self.mounts:
            if not all(part.startswith("/") for part in mount.rsplit(":", 1)) or ":" not in mount:
                raise ValueError(f"sandbox.mounts holds {mount!r}; it must be /outside:/inside")
        for item in self.environment:
            if not item.partition("=")[1] or not item.partition("=")[0]:
                raise ValueError(f"sandbox.environment holds {item!r}; it must be NAME=value")
        return self


class Reminders(Section):
    local: bool = Field(True, description="Turn-local Reminders in the teacher's view")
    global_: bool = Field(True, alias="global", description="the Global Reminder in the teacher's view")
    judge: Literal["none", "scripted", "model"] = Field("scripted", description="who decides the contextual categories")
    judge_url: str = Field("", description="judge = model: the endpoint before /chat/completions, as "
                                           "http://host:8000/v1; or engine, the rollout engine itself")
    judge_model: str = Field("", description="judge = model: the model's name at the endpoint")
    judge_key_variable: str = Field("", description="environment variable that holds the endpoint's key; empty: none")
    judge_body: str = Field('{"temperature": 0, "max_tokens": 1024}',
                            description="JSON object: what else every request holds")
    judge_request_s: float = Field(60.0, gt=0, description="seconds for one request to the judge")
    judge_total_s: float = Field(150.0, gt=0, description="seconds for one question with its retries; then no decision")
    judge_concurrency: int = Field(8, ge=1, description="requests to the judge under way at once")
    judge_cache: str = Field("", description="folder of the judge's answers; empty: judge/ under run.folder")
    classes: tuple[Literal["R1", "R2", "R3", "R4"], ...] = Field(("R1", "R2", "R3", "R4"),
                                                                 description="reminder classes in use")
    disabled: tuple[str, ...] = Field((), description="rubric categories that are switched off")
    micro_texts: bool = Field(True, description="the rubric's short texts for MicroSWE's tiny models")
    family_cap: int = Field(4, ge=0, description="most contextual reminders of one family in a trajectory (paper: 1)")
    rubric: str = Field("", description="a rubric file of your own, on top of ours")
    budget: int = Field(4, ge=0, description="most local reminders in one trajectory (the paper does not say)")
    control: Literal["none", "placebo", "withheld"] = Field(
        "none", description="what is shown instead of a reminder: another task's (placebo), or nothing (withheld)")
    utility: Literal["off", "measure", "filter"] = Field(
        "off", description="oprd: how far each local reminder moves the teacher at the bad step; filter drops the rest")
    min_utility: float = Field(0.0, description="utility = filter: nats a local reminder must move the teacher by")


class OPRD(Section):
    attempts_per_task: int = Field(1, ge=1, description="rollouts of each task in a step (open in the paper)")
    routing: bool = Field(True, description="imitate successes, distil failures; false: distil all (OPSD)")
    support: Literal["topk", "tail", "generalised", "full"] = Field(
        "topk", description="what the KL compares: the renormalised top-k, the top-k and one outcome for the rest, the "
                            "top-k as they are (generalised KL), or the whole vocabulary")
    top_k: int = Field(100, ge=1, description="size of the joint support")
    temperature: float = Field(1.0, gt=0, description="distillation temperature")
    direction: Literal["reverse", "forward"] = Field("reverse", description="reverse is KL(student || teacher)")
    lambda_success: float = Field(1.0, ge=0, description="weight of the imitation branch")
    lambda_failure: float = Field(1.0, ge=0, description="weight of the distillation branch")
    aggregate: Literal["token", "trajectory"] = Field("token", description="mean over tokens, or over trajectories")
    denominator: Literal["separate", "joint"] = Field("separate", description="each branch has its own mean, or one")
    without_reminder: Literal["drop", "distil"] = Field("drop", description="failures with no reminder at all")
    refresh: Literal["fractions", "every", "frozen", "shared"] = Field("fractions", description="teacher schedule")
    refresh_at: tuple[float, ...] = Field((0.2, 0.4, 0.6, 0.8), description="refresh = fractions: when, of training")
    refresh_every: int = Field(50, ge=1, description="refresh = every: optimizer steps between refreshes")

    @model_validator(mode="after")
    def _fractions(self):
        if any(not 0 < f < 1 for f in self.refresh_at):
            raise ValueError(f"refresh_at = {list(self.refresh_at)} must lie between 0 and 1")
        return self


class RL(Section):
    reward: Literal["outcome", "checklist", "holistic"] = Field(
        "outcome", description="hidden tests; or the verifier's: share of the checklist that is met, or one question")
    attempts_per_task: int = Field(8, ge=2, description="attempts of each task in a step: a group")
    advantage: Literal["grpo", "rloo", "leave_one_out"] = Field("rloo", description="a group's baseline")
    std: bool = Field(False, description="divide advantages by the group's standard deviation")
    clip_low: float = Field(0.2, ge=0, le=1, description="the ratio is held at 1 - this for worse attempts")
    clip_high: float = Field(0.28, ge=0, description="the ratio is held at 1 + this for better attempts")
    ratio: Literal["behaviour", "trainer"] = Field(
        "behaviour", description="importance ratio to the engine's sampling, clipped; or the engine's mismatch as a "
                                 "capped constant factor")
    ratio_cap: float = Field(5.0, gt=1, description="largest importance ratio")
    aggregate: Literal["token", "trajectory", "constant"] = Field(
        "token", description="mean over tokens; over attempts of their means; or of sums over rl.length")
    length: float = Field(0.0, ge=0, description="aggregate = constant: tokens; 0: rollout.max_context_tokens")
    kl: float = Field(0.0, ge=0, description="weight of the KL to the start model; 0: no reference is loaded")
    masked: tuple[Literal["context_limit", "reply_limit", "turn_limit", "time_limit", "malformed"], ...] = Field(
        ("context_limit", "reply_limit"), description="endings that are no measurement: out of every statistic")
    patience: int = Field(20, ge=0, description="steps in a row in which every group agrees that end the run; 0: never")


class Prefix(Section):
    on: bool = Field(False, description="Prefix Sampling: replay own beginnings to hold pass rates near one half")
    low: float = Field(0.3, ge=0, le=1, description="groups below this pass rate get a head start")
    high: float = Field(0.7, ge=0, le=1, description="groups above this pass rate get a handicap")
    remaining: float = Field(0.75, ge=0, le=1, description="head start: share of a success left to do")
    prefix: float = Field(0.25, ge=0, le=1, description="handicap: share of a failure that is replayed")
    remaining_cap: int = Field(0, ge=0, description="head start: most turns left to do; 0: no cap")
    prefix_cap: int = Field(0, ge=0, description="handicap: most turns replayed; 0: no cap")
    most: int = Field(0, ge=0, description="replayed groups in a step; 0: as many as there are")
    kinds: tuple[Literal["head_start", "handicap"], ...] = Field(("head_start", "handicap"), description="what is made")
    adaptive: bool = Field(False, description="a controller for every bucket moves its ratio; else they stay")
    alpha: float = Field(0.05, gt=0, le=1, description="adaptive: weight of the newest pass rate")
    target: float = Field(0.5, gt=0, lt=1, description="adaptive: the pass rate wanted of replayed groups")
    zone: float = Field(0.03, ge=0, description="adaptive: half the width of the dead zone")
    move: float = Field(0.05, gt=0, description="adaptive: one move of the ratio")
    cooldown: int = Field(5, ge=1, description="adaptive: least steps between moves")
    restart: bool = Field(True, description="adaptive: a move begins the mean anew (without, it swings)")
    withdraw: tuple[float, float] = Field((1.0, 1.0), description="shares of training between which help fades away")
    compare_states: bool = Field(True, description="record and compare the sandbox's state after every turn")


class Verifier(Section):
    kind: Literal["scripted", "endpoint", "policy", "frozen"] = Field(
        "scripted", description="who answers the rewards' questions: a script, a model at url, the policy itself, or "
                                "the model it started from")
    true_positive: float = Field(0.9, ge=0, le=1, description="kind = scripted: rate of yes to met items")
    false_positive: float = Field(0.2, ge=0, le=1, description="kind = scripted: rate of yes to unmet items")
    url: str = Field("", description="kind = endpoint: what stands before /chat/completions, as http://host:8000/v1")
    model: str = Field("", description="kind = endpoint: the model's name there")
    key_variable: str = Field("", description="environment variable that holds the endpoint's key; empty: none")
    body: str = Field('{"temperature": 0, "max_tokens": 2048}', description="JSON object: what else a request holds")
    max_tokens: int = Field(64, ge=1, description="kind = policy: tokens of one answer")
    request_s: float = Field(120.0, gt=0, description="seconds for one request")
    total_s: float = Field(300.0, gt=0, description="seconds for one question with its retries")
    concurrency: int = Field(8, ge=1, description="questions under way at once")
    cache: str = Field("", description="folder of the answers; empty: verifier/ under run.folder")
    votes: int = Field(1, ge=1, description="readable answers of one question; more than half decide")
    retries: int = Field(2, ge=0, description="further questions for votes that did not come; then there is no reward")


class ChecklistSettings(Section):
    path: str = Field("", description="checklists (JSONL: task_id, items); empty: those in the tasks' rows")
    bonus: float = Field(0.0, ge=0, le=1, description="share of the reward that only a complete answer gets")
    correct: bool = Field(False, description="correct rewards for the verifier's measured rates of yes")
    drop_saturated: bool = Field(False, description="leave out items on which a whole group agrees")
    ask_holistic: bool = Field(False, description="also ask the holistic question, for --stage checklist-report")
    candidates: int = Field(4, ge=0, description="stage checklists: recorded answers shown of each task")


class SelfVerify(Section):
    on: bool = Field(False, description="train the policy's own verifications (Soft-SVeRL); rl.reward = checklist")
    anchor: Literal["none", "majority", "frozen", "gold"] = Field(
        "gold", description="what its votes are held against: nothing, themselves, the frozen verifier, the truth")
    rows: int = Field(64, ge=0, description="most votes trained in a step")
    gold: int = Field(16, ge=0, description="questions of known truth imitated in a step")
    canaries: int = Field(16, ge=0, description="answers known to be wrong asked about in a step")
    alarm: float = Field(0.5, ge=0, le=1, description="smoothed share of canaries passed that raises an alarm")
    patience: int = Field(3, ge=1, description="steps of alarm in a row that end the run")
    penalty: float = Field(1.0, ge=0, description="taken from a yes, times the inflation of yes")
    renew: int = Field(0, ge=0, description="verifier.kind = frozen: steps between copies of the policy; 0: never")


class RFT(Section):
    attempts_per_task: int = Field(4, ge=1, description="attempts of each task in a step")
    select: Literal["rubric", "outcome", "random"] = Field("rubric", description="what is imitated of solved attempts: "
                                                           "the rubric's best, all, or as many drawn at random")
    top: int = Field(1, ge=1, description="attempts kept of a task in a step")
    cap: int = Field(0, ge=0, description="attempts kept of a task over the run; 0: no cap")
    rubric: str = Field("", description="a GRM rubric file of your own; empty: rollout/grm_rubric.toml")


class CheckTasks(Section):
    times: int = Field(3, ge=1, description="check-tasks: gradings of a task's own patch, and of no patch")
    workers: int = Field(2, ge=1, description="check-tasks: tasks checked at once")


class Eval(Section):
    attempts: int = Field(1, ge=1, description="attempts at each task")
    tasks: int = Field(0, ge=0, description="tasks taken from the file; 0: all")
    temperature: float = Field(1.0, ge=0, description="sampling temperature (the paper evaluates at 1.0)")
    top_p: float = Field(0.95, gt=0, le=1, description="nucleus sampling (the paper evaluates at 0.95)")
    following: bool = Field(False, description="also insert reminders while running and count how many are followed")
    mode: Literal["passive", "active"] = Field(
        "passive", description="following: reminders after the observation, or after a probe of the next action")
    retry: bool = Field(False, description="also attempt failed tasks afresh with the Global Reminder in sight")


class IFData(Section):
    sources: tuple[Literal["given", "unaided", "retry", "plain"], ...] = Field(
        ("given", "unaided", "retry"), description="stage if-data: kinds of rows to make (docs/reminders.md)")
    per_category: int = Field(0, ge=0, description="most rows of one reminder category; 0: all")
    only_resolved: bool = Field(False, description="take rows from attempts only that pass the hidden tests")


class Config(Section):
    run: Run = Run()
    model: Model = Model()
    chat: ChatSettings = ChatSettings()
    microswe: MicroSWE = MicroSWE()
    microif: MicroIF = MicroIF()
    data: Data = Data()
    train: Train = Train()
    parallel: Parallel = Parallel()
    plan: PlanSettings = PlanSettings()
    rollout: Rollout = Rollout()
    sglang: SGLang = SGLang()
    sandbox: SandboxSettings = SandboxSettings()
    reminders: Reminders = Reminders()
    oprd: OPRD = OPRD()
    rl: RL = RL()
    prefix: Prefix = Prefix()
    rft: RFT = RFT()
    verifier: Verifier = Verifier()
    checklist: ChecklistSettings = ChecklistSettings()
    selfverify: SelfVerify = SelfVerify()
    eval: Eval = Eval()
    if_data: IFData = IFData()
    check: CheckTasks = CheckTasks()
