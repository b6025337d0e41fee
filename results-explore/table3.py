import json,glob,statistics as st
T={"1,6,6,6,6":14400,"1,2,2,2,2":8000,"1,1,6,6,6":9600,"1,1,1,6,6":7200,"1,1,2,2,2":6880,"1,1,1,1,1":4800,"1,15,15,15,15":19200,"1,1,1,2,2":6080,"1,1,1,1,6":5760,"1,1,1,1,15":5920,"1,1,1,1,2":5360,"1,1,1,15,15":7680,"1,1,15,15,15":10960}
R={}
for f in glob.glob("runs/*.json"):
    r=json.load(open(f)); s=r["settings"]
    row=",".join(str(int(p)) for p in s["paces"])
    name=" ".join(str(x) for x in (s["assign"],s["method"],s["weight"],s.get("second_moment") or "-", f"lr{s['lr']*1e4:g}", f"eta{s['outer_lr']:g}" if s["method"]!="sync-nesterov" else "", "seed%d"%s["seed"]))
    extra={k:s[k] for k in ("k_stale","k_fresh","weight_exponent") if s.get(k) is not None}
    if s["adam_eps"]!=1e-8: extra["eps"]=s["adam_eps"]
    if s["beta2"]!=.999: extra["beta2"]=s["beta2"]
    R[(name+(str(extra) if extra else ""),row)]=r
if __name__=="__main__":
    names=sorted({n for n,_ in R})
    for n in names:
        rows=[row for (m,row) in R if m==n]
        print(n); print("    ",{row if len(row)<30 else "K=%d"%(row.count(",")+1):R[(n,row)]["evals"]["loss"][-1] for row in rows}, "mean", round(st.fmean(R[(n,row)]["evals"]["loss"][-1] for row in rows),3), len(rows))
    print()
    for sname,mains in (("fixed sync-nesterov average rows lr16  seed1",["fixed heloco-ramp annealed rows lr16 eta1 seed1"]),("flexible sync-nesterov average - lr16  seed1",["flexible heloco-ramp discounted - lr16 eta1 seed1"])):
        e=R[(sname,"1,1,1,1,1")]["evals"]
        for m in mains:
            tot=[]
            for row in T:
                a=R[(m,row)]["evals"]["loss"][-1]; slow=max(map(int,row.split(",")))
                rounds=T[row]//(80*slow)
                at=e["loss"][rounds]
                tot.append(a); print(m[:28],row,a,"sync@T",at, "%.1f%%"%(100*(at-a)/at),"sync tokens",e["loss"][-1], "%.2f%%"%(100*(e["loss"][-1]-a)/e["loss"][-1]))
            print("mean",st.fmean(tot))
    for (n,row),r in R.items():
        if row.count(",")>4 or True:
            l=r["evals"]["loss"]; q=len(l)//4; worst=max(x-min(l[:i+1]) for i,x in enumerate(l) if i>=q)
            if row.count(",")>4 or "discounted" in n: print(n,row[:14],"K",row.count(",")+1,"max above lowest after first quarter %.2f"%worst, l if row.count(",")>4 else "")
