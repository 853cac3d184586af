//! Connections on engines with threads, and the end of everything.

use std::sync::Arc;

use pvrdma_verbs::QueuePair;
use pvrdma_verbs_types::WcStatus;

use super::*;
use crate::threads::wait;
use crate::world::{SEND, pattern, write};

/// Returns the number of open sockets of a network.
fn open_sockets(sockets: &Loopback) -> usize {
    let [_, a, b, _] = sockets.host(0).octets();
    let network = format!("{b:02X}{a:02X}7F");
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let is_open = |line: &str| {
        let fields: Vec<_> = line.split_whitespace().collect();
        // A socket without an owner has no inode.
        fields[1].split(':').next().unwrap().ends_with(&network) && fields[9] != "0"
    };
    table.lines().skip(1).filter(|line| is_open(line)).count()
}

/// Returns the number of threads of devices' connections in this process.
fn threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let name = |task: std::io::Result<std::fs::DirEntry>| std::fs::read_to_string(task.ok()?.path().join("comm")).ok();
    tasks.filter_map(name).filter(|name| name.trim_end() == "rxe-iwarp").count()
}

/// The only test whose engines have workers, because it counts threads.
#[test]
fn threads_serve_connections_and_end_with_the_device() {
    const LEN: u64 = 100_000;
    const MESSAGES: u64 = 200;
    let net = Net::with(2, |config| config);
    assert_eq!(threads(), 2);
    let pairs: Vec<_> = (0..4).map(|_| net.connect()).collect();
    let buffers = net.guests.each_ref().map(|guest| guest.node.buffer(2 * LEN));
    buffers[0].write(0, &pattern(1, LEN));
    buffers[1].write(0, &pattern(2, LEN));
    std::thread::scope(|scope| {
        for (number, Ends { left, right, .. }) in pairs.iter().enumerate() {
            let (mine, theirs) = (&buffers[0], &buffers[1]);
            scope.spawn(move || (0..MESSAGES).for_each(|id| left.submit(id, SEND, &[mine.sge(0, LEN)])));
            scope.spawn(move || (0..MESSAGES).for_each(|id| right.recv(id, &[theirs.sge(LEN, LEN)])));
            if number == 0 {
                scope.spawn(move || {
                    (0..MESSAGES).for_each(|id| right.submit(id, write(mine.remote(LEN)), &[theirs.sge(0, LEN)]));
                });
            }
        }
    });
    for Ends { left, right, .. } in &pairs {
        wait("all sends", || left.scq.total() == MESSAGES);
        wait("all receives", || right.rcq.total() == MESSAGES);
        let all = left.scq.poll().into_iter().chain(right.rcq.poll());
        assert!(all.into_iter().all(|completion| completion.status == WcStatus::Success));
    }
    wait("the writes", || buffers[0].read(LEN, LEN) == pattern(2, LEN));
    assert!(buffers[1].read(LEN, LEN) == pattern(1, LEN));
    // Ends of all kinds while there is traffic.
    let sockets = Arc::clone(&net.sockets);
    pairs[0].left.submit(1000, SEND, &[buffers[0].sge(0, LEN)]);
    pairs[0].right.qp.destroy();
    pairs[1].left.to(pvrdma_verbs_types::QpState::Reset);
    drop(pairs);
    drop((buffers, net));
    assert_eq!(threads(), 0);
    assert_eq!(open_sockets(&sockets), 0);
}
