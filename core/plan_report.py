"""`--stage plan`: a layout's costs as a table, and for one that cannot fit the smallest change that would make it."""

from __future__ import annotations

from typing import Iterator

from oprd.core import hf
from oprd.core.architecture import ModelConfig
from oprd.core.plan import start_folder
from oprd.core.plan_costs import GIB, Costs, Work, changed, costs
from oprd.core.settings import Config, Parallel, PlanSettings


def report(config: Config) -> str:
    """The plan in words. ValueError for a layout that does not divide or does not fit, with what to change."""
    model, parallel, p = architecture(config), config.parallel, config.plan
    work = work_of(config)
    if work.length > work.tokens // (2 if work.teacher else 1):
        both = " (student and teacher together)" if work.teacher else ""
        raise ValueError(f"train.micro_batch_tokens = {work.tokens}{both} must hold a row of {work.length} tokens"
                         f"{' twice' if work.teacher else ''}; raise it")
    found = costs(model, parallel, p.gpus, work)
    text = table(found, work, parallel, p)
    if found.total > room(p):
        change = next(smallest_change(model, parallel, p, work), "no single change does: take more GPUs and a larger cp "
                                                                 "or tp")
        raise ValueError(f"the layout needs {found.total / GIB:.1f} GiB on a GPU of {p.memory_gib:g} GiB "
                         f"({p.reserved_gib:g} reserved), most of it {_largest(found)}; smallest change that fits: "
                         f"{change}")
    return text


def architecture(config: Config) -> ModelConfig:
    """Of the model to plan for. FileNotFoundError names the folder that is to hold its config.json."""
    return hf.load_config(config.plan.architecture or start_folder(config, config.plan.stage))


def work_of(config: Config) -> Work:
    """The largest optimizer step that the settings allow: every row as long as it may be."""
    distils = config.plan.stage == "oprd"
    length = config.rollout.max_context_tokens if distils else config.data.max_tokens
    return Work(config.train.batch, length, config.train.micro_batch_tokens, distils)


def room(p: PlanSettings) -> float:
    return (p.memory_gib - p.reserved_gib) * GIB


def smallest_change(model: ModelConfig, parallel: Parallel, p: PlanSettings, work: Work) -> Iterator[str]:
    """Changes of one setting that make the layout fit, those that cost least time first."""
    tries = [("parallel.zero = 1", dict(zero=1)), ("parallel.zero = 2", dict(zero=2)),
             ("parallel.weights = bf16", dict(weights="bf16")), ("parallel.recompute = true", dict(recompute=True)),
             ("parallel.offload = true", dict(offload=True))]
    for name in ("ep", "cp", "tp"):
        tries += [(f"parallel.{name} = {n}", {name: n, "dp": 0}) for n in (2, 4, 8, 16, 32)
                  if n > getattr(parallel, name)]
    for words, fields in tries:
        if parallel.zero >= fields.get("zero", 3) or all(getattr(parallel, k) == v for k, v in fields.items()):
            continue
        try:
            if costs(model, changed(parallel, **fields), p.gpus, work).total <= room(p):
                yield words
        except ValueError:  # it does not divide
            continue
    for gpus in (2 * p.gpus, 4 * p.gpus, 8 * p.gpus):
        try:
            if costs(model, changed(parallel, dp=0), gpus, work).total <= room(p):
                yield f"plan.gpus = {gpus} (parallel.dp = 0)"
        except ValueError:
            continue


def spans_nodes(axis: str, parallel: Parallel, p: PlanSettings) -> bool:
    """Whether an axis's ranks lie on several nodes."""
    inner = parallel.cp * parallel.tp
    reach = {"tp": parallel.tp, "cp": inner, "sequence": inner, "ep": parallel.ep}.get(axis, p.gpus)
    return reach > p.gpus_per_node


def table(found: Costs, work: Work, parallel: Parallel, p: PlanSettings) -> str:
    """Memory by component, bytes by axis and link, products, and the least time of a step."""
    lines = [f"layout          {p.gpus} GPUs: dp {max(1, p.gpus // (parallel.cp * parallel.tp))} x cp {parallel.cp} x tp "
             f"{parallel.tp}, ep {parallel.ep}, zero {parallel.zero}, weights {parallel.weights}"
             f"{', recompute' if parallel.recompute else ''}{', offload' if parallel.offload else ''}",
             f"step            {work.rows} rows of {work.length:,} tokens, {found.rounds} micro-batches a rank"]
    lines += [f"memory          {bytes_ / GIB:8.2f} GiB  {name}" for name, bytes_ in found.memory.items() if bytes_]
    lines.append(f"memory          {found.total / GIB:8.2f} GiB  of {p.memory_gib:g} ({p.reserved_gib:g} reserved)")
    compute = found.flops / (p.tflops * 1e12)
    links = {"link": 0.0, "network": 0.0}
    for axis, sent in sorted(found.sent.items()):
        link = "network" if spans_nodes(axis, parallel, p) else "link"
        links[link] += sent / ((p.network_gbs if link == "network" else p.link_gbs) * 1e9)
        lines.append(f"sent            {sent / 1e9:8.2f} GB   {axis} ({link})")
    bound = max(compute, *links.values())
    lines += [f"products        {found.flops / 1e12:8.1f} TFLOP a rank and step (causal attention halved)",
              f"step time       {bound:8.1f} s at least: products {compute:.1f}, link {links['link']:.1f}, network "
              f"{links['network']:.1f}, all overlapped; {compute + sum(links.values()):.1f} with nothing overlapped",
              f"tokens          {work.rows * work.length / bound / p.gpus:8.0f} a second and GPU at most"]
    return "\n".join(lines)


def _largest(found: Costs) -> str:
    name, bytes_ = max(found.memory.items(), key=lambda item: item[1])
    return f"{name} ({bytes_ / GIB:.1f} GiB)"
