from gen1 import E,M,X,Y,Z,line
ROWS='''"1,15,15,15,15" = { paces = [1, 15, 15, 15, 15] }
"1,1,15,15,15" = { paces = [1, 1, 15, 15, 15] }
"1,6,6,6,6" = { paces = [1, 6, 6, 6, 6] }
"1,1,6,6,6" = { paces = [1, 1, 6, 6, 6] }
"1,2,2,2,2" = { paces = [1, 2, 2, 2, 2] }
"1,1,2,2,2" = { paces = [1, 1, 2, 2, 2] }
"1,1,1,15,15" = { paces = [1, 1, 1, 15, 15] }
"1,1,1,6,6" = { paces = [1, 1, 1, 6, 6] }
"1,1,1,2,2" = { paces = [1, 1, 1, 2, 2] }
"1,1,1,1,15" = { paces = [1, 1, 1, 1, 15] }
"1,1,1,1,6" = { paces = [1, 1, 1, 1, 6] }
"1,1,1,1,2" = { paces = [1, 1, 1, 1, 2] }
"1,1,1,1,1" = { paces = [1, 1, 1, 1, 1] }
'''
HEAD='''like = "table1"
title = "%s"
paper = {}

[settings]
keep_state = true
lr_position = "run"
outer_lr = 1.0
lr = 0.0016
%s
[small]
keep_state = true

[rows]
'''+ROWS+'''
[methods]
'''
AN=dict(weight="annealed"); ALL=[E,M,X,Y,Z]
def whole(name,**kw): return line(name,[],**kw).replace(", rows = []","")
def sync(name,**kw): return line(name,[E],method="sync-nesterov",outer_lr=0.7,**kw)
fixed=[
 whole("ramp annealed",**AN),
 line("ramp",ALL),
 line("mla annealed",ALL,**AN,method="mla"),
 line("mla",[E,X],method="mla"),
 line("ramp balanced",[M,X,Y,Z],weight="balanced"),
 line("ramp annealed lr10",[M,X],**AN,lr=10e-4),
 sync("sync"),
]
flex=[
 whole("ramp discounted",weight="discounted"),
 line("ramp paced",[M,X,Y,Z],weight="paced"),
 line("ramp annealed",[M,X,Y,Z],**AN),
 line("mla discounted",[E,M,X],weight="discounted",method="mla"),
 line("ramp discounted rows",[E,M,X],weight="discounted",second_moment="rows"),
 line("ramp discounted lr10",[X],weight="discounted",lr=10e-4),
 sync("sync"),
]
open("third-fixed.toml","w").write(HEAD%("A third look, fixed shards, second moments raised row by row",'second_moment = "rows"\n')+"\n".join(fixed)+"\n")
open("third-flexible.toml","w").write(HEAD%("A third look, flexible shards",'assign = "flexible"\n')+"\n".join(flex)+"\n")
open("third-many.toml","w").write('''like = "table1"
title = "Many workers, 20 rounds each"
paper = {}

[settings]
keep_state = true
lr_position = "run"
outer_lr = 1.0
assign = "flexible"
lr = 0.0016

[small]
keep_state = true
inner_steps = 2

[rows]
"10" = { paces = [1, 1, 6, 6, 6], workers = 10, arrivals = 200, eval_every = 10, methods = ["ramp discounted"] }
"20" = { paces = [1, 1, 6, 6, 6], workers = 20, arrivals = 400, eval_every = 20, methods = ["ramp discounted"] }
"64" = { paces = [1, 1, 6, 6, 6], workers = 64, arrivals = 1280, eval_every = 64 }

[methods]
"ramp discounted" = { method = "heloco-ramp", weight = "discounted" }
"sync" = { method = "sync-nesterov", outer_lr = 0.7 }
''')
