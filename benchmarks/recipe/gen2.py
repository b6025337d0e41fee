from gen1 import E,M,X,Y,Z,HEAD,line
L16=dict(lr=16e-4); L32=dict(lr=32e-4); AN=dict(weight="annealed")
fixed=[
 line("ramp lr16",[E,M,X,Y,Z],**L16),
 line("ramp lr32",[E,M,X],**L32),
 line("ramp lr16 annealed",[E,M,X,Y,Z],**L16,**AN),
 line("ramp lr16 pooled",[E,M,X,Y,Z],**L16,second_moment="pooled"),
 line("ramp lr16 rows",[E,M,X,Y,Z],**L16,second_moment="rows"),
 line("ramp lr16 eps1e-5",[E,X],**L16,adam_eps=1e-5),
 line("ramp lr16 share .25 down",[X,Y,Z],**L16,weight="share",weight_exponent=0.25,weight_floor=0.1,weight_ceiling=1.0),
 line("mla lr16",[E,M,X,Y],**L16,method="mla"),
 line("ramp lr16 annealed eta1.4",[E,M,X],**L16,**AN,outer_lr=1.4),
 line("ramp lr32 annealed",[E,M,X],**L32,**AN),
 line("ramp lr16 annealed rows",[E,M,X,Y,Z],**L16,**AN,second_moment="rows"),
]
flex=[
 line("mla lr16",[E,M,X,Z],**L16,method="mla"),
 line("mla lr32",[E,X],**L32,method="mla"),
 line("mla lr16 annealed",[E,M,X,Z],**L16,**AN,method="mla"),
 line("mla lr16 concurrent",[E,M,X,Z],**L16,weight="concurrent",method="mla"),
 line("ramp lr16 annealed",[E,X],**L16,**AN),
 line("mla lr32 annealed",[E],**L32,**AN,method="mla"),
]
def sync(name,**kw): return line(name,[E],method="sync-nesterov",outer_lr=0.7,**kw)
fixed+=[sync("sync lr8",lr=8e-4),sync("sync lr16",**L16)]
flex+=[sync("sync lr8",lr=8e-4),sync("sync lr16",**L16),sync("sync lr32",**L32)]
open("second-fixed.toml","w").write(HEAD%"A second look, fixed shards"+"\n".join(fixed)+"\n")
FLEX=HEAD.replace("outer_lr = 1.0\n","outer_lr = 1.0\nassign = \"flexible\"\n")
open("second-flexible.toml","w").write(FLEX%"A second look, flexible shards"+"\n".join(flex)+"\n")
K='''like = "table1"
title = "Many workers"
paper = {}

[settings]
keep_state = true
lr_position = "run"
outer_lr = 1.0
assign = "flexible"
lr = 0.0016

[small]
keep_state = true
arrivals = 128
eval_every = 64

[rows]
"64" = { paces = [1, 1, 6, 6, 6], workers = 64, arrivals = 1280, eval_every = 64 }

[methods]
mla-annealed = { method = "mla", weight = "annealed" }
sync = { method = "sync-nesterov", outer_lr = 0.7 }
mla-bounded = { method = "mla", weight = "bounded" }
ramp-annealed = { method = "heloco-ramp", weight = "annealed" }
'''
open("many.toml","w").write(K)
