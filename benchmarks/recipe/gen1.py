E="1,1,1,1,1"; M="1,1,6,6,6"; X="1,15,15,15,15"; Y="1,1,15,15,15"; Z="1,1,1,1,15"
def line(name, rows, **kw):
    def v(x): return ('"%s"'%x if isinstance(x,str) else "[%s]"%", ".join('"%s"'%r for r in x) if isinstance(x,list) else str(x).lower() if isinstance(x,bool) else repr(x))
    kw.setdefault("method","heloco-ramp")
    return f'"{name}" = {{ ' + ", ".join(f"{k} = {v(x)}" for k,x in {**kw,"rows":rows}.items())+" }"
HEAD='''like = "table1"
title = "%s"
paper = {}

[settings]
keep_state = true
lr_position = "run"
outer_lr = 1.0

[small]
keep_state = true

[rows]
"1,15,15,15,15" = { paces = [1, 15, 15, 15, 15] }
"1,1,15,15,15" = { paces = [1, 1, 15, 15, 15] }
"1,1,6,6,6" = { paces = [1, 1, 6, 6, 6] }
"1,1,1,1,15" = { paces = [1, 1, 1, 1, 15] }
"1,1,1,1,1" = { paces = [1, 1, 1, 1, 1] }

[methods]
'''
fixed=[
 line("ramp lr2",[E,M,X,Y]),
 line("ramp lr4",[E,M,X,Y,Z],lr=4e-4),
 line("ramp lr8",[E,M,X,Y],lr=8e-4),
 line("ramp lr16",[E,X],lr=16e-4),
 line("ramp lr4 eps1e-6",[E,X],lr=4e-4,adam_eps=1e-6),
 line("ramp lr4 eps1e-5",[E,M,X],lr=4e-4,adam_eps=1e-5),
 line("ramp lr4 eps1e-4",[E,X],lr=4e-4,adam_eps=1e-4),
 line("ramp lr8 eps1e-5",[E,M,X],lr=8e-4,adam_eps=1e-5),
 line("ramp lr4 pooled",[E,M,X],lr=4e-4,second_moment="pooled"),
 line("ramp lr4 beta2 .99",[E],lr=4e-4,beta2=0.99),
 line("ramp lr4 eta.7",[E,M,X],lr=4e-4,outer_lr=0.7),
 line("mla lr4",[E,M,X,Y],lr=4e-4,method="mla"),
 line("adaptive 1,1 lr4",[X,Y],lr=4e-4,method="heloco-adaptive"),
 line("adaptive 1,3 lr4",[M,X,Y],lr=4e-4,method="heloco-adaptive",k_stale=3.0),
 line("adaptive 0,1.5 lr4",[E,M,X],lr=4e-4,method="heloco-adaptive",k_fresh=0.0,k_stale=1.5),
 line("share .5 lr4",[M,X,Y],lr=4e-4,weight="share",weight_exponent=0.5,weight_floor=0.25,weight_ceiling=2.0),
 line("share 1 down lr4",[M,X,Y],lr=4e-4,weight="share",weight_exponent=1.0,weight_floor=0.1,weight_ceiling=1.0),
]
flex=[
 line("mla lr4",[E,M,X,Z],lr=4e-4,method="mla"),
 line("mla lr8",[E,M,X],lr=8e-4,method="mla"),
 line("mla lr16",[E,X],lr=16e-4,method="mla"),
 line("ramp lr8",[E,M,X],lr=8e-4),
 line("mla lr8 eps1e-5",[E],lr=8e-4,method="mla",adam_eps=1e-5),
 line("mla lr8 eta.7",[E,X],lr=8e-4,method="mla",outer_lr=0.7),
 line("adaptive 0,1.5 lr8",[M,X],lr=8e-4,method="heloco-adaptive",k_fresh=0.0,k_stale=1.5),
]
def sync(name,**kw): return line(name,[E],method="sync-nesterov",outer_lr=0.7,**kw)
s=[sync("sync lr2"),sync("sync lr4",lr=4e-4),sync("sync lr8",lr=8e-4),sync("sync lr16",lr=16e-4),sync("sync lr8 eps1e-5",lr=8e-4,adam_eps=1e-5)]
if __name__ == "__main__":
    open("first-fixed.toml","w").write(HEAD%"A first look, fixed shards"+"\n".join(fixed+s)+"\n")
if __name__ == "__main__":
    open("first-flexible.toml","w").write((HEAD%"A first look, flexible shards").replace("outer_lr = 1.0\n","outer_lr = 1.0\nassign = \"flexible\"\n")+"\n".join(flex)+"\n")
