# One rank of train.py, with a wish of its own on rank 1.

# The launcher ends the other ranks at the first failure; here, each is to say why it failed.
trap '' TERM

if [ "$RANK" = 1 ]; then
    export DS_PATCHES_SKIP=coalesce
fi
exec python train.py "$@"
