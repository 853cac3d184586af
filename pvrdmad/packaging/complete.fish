
# Keys, and names of devices and networks, are those that the program knows.
function __pvrdmad_known
    set -l words (commandline -opc) (commandline -ct)
    $words[1] complete -- $words[2..] 2> /dev/null
end

complete -c pvrdmad -l device -x -a '(__pvrdmad_known)'
complete -c pvrdmad -l network -x -a '(__pvrdmad_known)'
complete -c pvrdmad -l backend -x -a '(__pvrdmad_known)'
complete -c pvrdmad -n '__fish_seen_subcommand_from add limits share' -f -a '(__pvrdmad_known)'
