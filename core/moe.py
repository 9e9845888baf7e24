"""INTERIM, by the lead: the helper who owns this file replaces it."""
import torch, torch.nn as nn, torch.nn.functional as F
class MLP(nn.Module):
    def __init__(s,d,i):
        super().__init__(); s.gate_proj=nn.Linear(d,i,bias=False); s.up_proj=nn.Linear(d,i,bias=False); s.down_proj=nn.Linear(i,d,bias=False)
    def forward(s,x,routers=None): return s.down_proj(F.silu(s.gate_proj(x))*s.up_proj(x))
class Ex(nn.Module):
    def __init__(s,E,D,Fm):
        super().__init__(); s.gate_up_proj=nn.Parameter(torch.zeros(E,2*Fm,D)); s.down_proj=nn.Parameter(torch.zeros(E,D,Fm))
class MoE(nn.Module):
    def __init__(s,c):
        super().__init__(); s.k=c.num_experts_per_tok; s.n=c.norm_topk_prob
        s.gate=nn.Linear(c.hidden_size,c.num_experts,bias=False); s.experts=Ex(c.num_experts,c.hidden_size,c.moe_intermediate_size)
        s.sh=bool(c.shared_expert_intermediate_size)
        if s.sh: s.shared_expert=MLP(c.hidden_size,c.shared_expert_intermediate_size); s.shared_expert_gate=nn.Linear(c.hidden_size,1,bias=False)
    def forward(s,x,routers=None):
        l=s.gate(x)
        if routers is not None: routers.append(l)
        p=l.softmax(-1,dtype=torch.promote_types(l.dtype,torch.float32)); w,i=p.topk(s.k,-1)
        if s.n: w=w/w.sum(-1,keepdim=True)
        y=0
        for e in range(p.shape[1]):
            g,u=(x@s.experts.gate_up_proj[e].T).chunk(2,-1)
            y=y+((i==e)*w).sum(-1,keepdim=True).to(x.dtype)*((F.silu(g)*u)@s.experts.down_proj[e].T)
        if s.sh: y=y+s.shared_expert(x)*torch.sigmoid(s.shared_expert_gate(x))
        return y

def balance_loss(router_logits, cu_seqlens, top_k):
    p=torch.stack([l.softmax(-1) for l in router_logits]); E=p.shape[-1]; out=[]
    f=torch.zeros_like(p).scatter_(-1,p.topk(top_k,-1).indices,1.0)
    cu=cu_seqlens.tolist()
    for a,b in zip(cu,cu[1:]): out.append(E*(f[:,a:b].flatten(0,1).mean(0)*p[:,a:b].flatten(0,1).mean(0)).sum())
    return torch.stack(out)
