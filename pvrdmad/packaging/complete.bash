
# Keys, and names of devices and networks, are those that the program knows.
_pvrdmad_known() {
    local line=${COMP_LINE:0:COMP_POINT} found part
    local -a words
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    mapfile -t found < <("${words[0]}" complete -- "${words[@]:1}" 2> /dev/null)
    if (( ${#found[@]} == 0 )) && [[ ${words[-2]} == --device || ${words[-2]} == --network ]]; then
        # No daemon answers, or it has no such name. Names of files would be wrong.
        compopt +o bashdefault +o default 2> /dev/null
        COMPREPLY=()
        return
    fi
    if (( ${#found[@]} == 0 )); then
        _pvrdmad "$@"
        return
    fi
    # Bash replaces the word only from the last character on that separates words for it.
    part=${words[-1]}
    part=${part%"${part##*[=:]}"}
    COMPREPLY=("${found[@]#"$part"}")
    [[ ${#found[@]} -gt 1 || ${found[0]} == *[=,] ]] && compopt -o nospace 2> /dev/null
}

complete -F _pvrdmad_known -o bashdefault -o default pvrdmad
