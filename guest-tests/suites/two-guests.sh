# For the other scripts: guest 1 serves SSH until guest 0, in which the suite runs, has ended it.
hostname "vm$PVRDMA_LAB_NUMBER"
mkdir -p /run/sshd
/usr/sbin/sshd -o MaxSessions=1000
if [ "$PVRDMA_LAB_NUMBER" != 0 ]; then
    until [ -e /tmp/done ]; do sleep 1; done
    exit
fi
until ssh -n vm1 true 2>/dev/null; do sleep 0.5; done
trap 'ssh -n vm1 touch /tmp/done' EXIT
cd /tmp
