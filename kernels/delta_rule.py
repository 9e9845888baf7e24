"""INTERIM, by the lead: the helper who owns this file replaces it."""
import torch, torch.nn as nn, torch.nn.functional as F
def step(q,k,v,g,beta,S):
    w=torch.promote_types(q.dtype,torch.float32)
    rep=v.shape[1]//q.shape[1]
    def nrm(x): x=x.to(w); return x*torch.rsqrt(x.pow(2).sum(-1,keepdim=True)+1e-6)
    q=nrm(q).repeat_interleave(rep,1)*q.shape[-1]**-.5; k=nrm(k).repeat_interleave(rep,1); v=v.to(w)
    S=S*g.to(w).exp()[...,None,None]
    d=beta.to(w)[...,None]*(v-torch.einsum('nhkv,nhk->nhv',S,k))
    S=S+torch.einsum('nhk,nhv->nhkv',k,d)
    return torch.einsum('nhkv,nhk->nhv',S,q),S
def gdr(q,k,v,g,beta,cu,states=None):
    out=[];fin=[]
    cu=cu.tolist(); w=torch.promote_types(q.dtype,torch.float32)
    for b in range(len(cu)-1):
        S=torch.zeros(1,v.shape[1],q.shape[2],v.shape[2],dtype=w) if states is None else states[b:b+1]
        for t in range(cu[b],cu[b+1]):
            o,S=step(q[t:t+1],k[t:t+1],v[t:t+1],g[t:t+1],beta[t:t+1],S); out.append(o)
        fin.append(S)
    return (torch.cat(out) if out else v*0).to(v.dtype),torch.cat(fin)
def gstep(q,k,v,g,beta,S):
    o,n=step(q,k,v,g,beta,S); S.copy_(n); return o

gated_delta_rule=gdr; gated_delta_rule_step=gstep
