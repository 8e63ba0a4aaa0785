#!/bin/sh
if [ "$1" = --version ]; then echo "Cuda compilation tools, release 13.0, V13.0.88"; exit 0; fi
name=$(sed -n 's/^.*\.entry \([A-Za-z0-9_]*\).*/\1/p' | head -n 1)
cat >&2 <<END
ptxas info    : Compiling entry function '$name' for 'sm_90a'
ptxas info    : Function properties for $name
    16 bytes stack frame, 24 bytes spill stores, 32 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers, 16 bytes cumulative stack size
END
printf '\177ELF of %s' "$name"
