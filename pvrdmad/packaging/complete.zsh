
# Keys, and names of devices and networks, are those that the program knows.
_pvrdmad_known() {
    local -a found
    # `words` has only the words of the command here, so the line is split anew.
    local -a line=("${(@z)LBUFFER}")
    [[ $LBUFFER == *[[:space:]] ]] && line+=("")
    found=("${(@f)$("${line[1]}" complete -- "${(@)line[2,-1]}" 2> /dev/null)}")
    [[ -n $found[1] ]] || return 1
    compadd -Q -S "" -- "${found[@]}"
}
