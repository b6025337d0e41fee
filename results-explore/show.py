import json,glob,sys
keys=["run_workers","assign","method","lr","adam_eps","beta2","outer_lr","weight","k_fresh","k_stale","second_moment","weight_exponent","weight_ceiling"]
for f in sorted(glob.glob("/work/wt/recipe/results-explore/"+(sys.argv[2] if len(sys.argv)>2 else "runs")+"/*.json")):
    r=json.load(open(f)); s=r["settings"]; e=r["evals"]
    d={k:s.get(k) for k in keys if s.get(k) not in (None,"base",0.999,1e-8,"fixed")}
    row=",".join(str(int(p)) for p in s["paces"])
    print(row,d, r["verdict"], "final",e["loss"][-1],{k:v["loss"][-1] for k,v in e["sources"].items()})
    if len(sys.argv)>1: print("    ",[round(x,2) for x in e["loss"]])
