"""INTERIM, by the lead: the helper who owns this file replaces it."""
import torch, torch.nn as nn, torch.nn.functional as F
def conv(x,w,cu,windows=None):
    cu=cu.tolist(); W=w.shape[1]; ys=[];ws=[]
    for b in range(len(cu)-1):
        p=x[cu[b]:cu[b+1]]; h=torch.zeros(W-1,x.shape[1],dtype=x.dtype) if windows is None else windows[b]
        z=torch.cat([h,p]); ws.append(z[len(z)-(W-1):])
        if len(p): ys.append(F.conv1d(z.T[None],w[:,None],groups=w.shape[0])[0].T)
    return F.silu(torch.cat(ys) if ys else x),torch.stack(ws)
def cstep(x,w,win):
    z=torch.cat([win,x[:,None]],1); win.copy_(z[:,1:]); return F.silu((z*w.T[None]).sum(1))

short_conv=conv; short_conv_step=cstep
