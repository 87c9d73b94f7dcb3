rule extension:
    input:
        code="results/.code/extension.txt",
    output:
        EXTENSION,
    log:
        "results/logs/extension.log",
    conda:
        "../../environment.yml"
    threads: asked("prepare").threads
    resources:
        **needs("prepare"),
    shell:
        "attngeo build --report {output} > {log} 2>&1"


rule tracking_store:
    output:
        TRACKING,
    log:
        "results/logs/tracking_store.log",
    conda:
        "../../environment.yml"
    threads: asked("prepare").threads
    resources:
        **needs("prepare"),
    shell:
        "attngeo track init --report {output} > {log} 2>&1"
