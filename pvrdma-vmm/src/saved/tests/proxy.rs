//! A proxy between the two ends of a migration, which passes frames on.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use parking_lot::Mutex;

use crate::saved::frames::Kind;
use crate::saved::link::Cancel;

/// Intervention of a proxy, at the frame with this index. Frames of both directions are counted together,
/// because their order is the same in each migration.
#[derive(Clone, Copy)]
pub(super) enum Action {
    Pass,
    /// The connection ends, and the frame is lost.
    EndAt(usize),
    /// The source is cancelled, and the frame arrives.
    CancelAt(usize),
}

struct Shared {
    action: Action,
    cancel: Arc<Cancel>,
    passed: Mutex<Vec<Kind>>,
    /// Both connections, at the proxy.
    sockets: [UnixStream; 2],
}

pub(super) struct Proxy {
    shared: Arc<Shared>,
    threads: [JoinHandle<()>; 2],
}

impl Proxy {
    /// Starts a proxy, and returns the sockets for source and destination.
    pub(super) fn between(action: Action, cancel: Arc<Cancel>) -> (Self, UnixStream, UnixStream) {
        let [(source, a), (destination, b)] = [(); 2].map(|()| UnixStream::pair().unwrap());
        let shared = Arc::new(Shared { action, cancel, passed: Mutex::default(), sockets: [a, b] });
        let threads = [(0, 1), (1, 0)].map(|(from, to)| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let [from, to] = [from, to].map(|end: usize| &shared.sockets[end]);
                // It ends with the connection.
                let _ = shared.pass(from, to);
                let _ = to.shutdown(Shutdown::Write);
            })
        });
        (Self { shared, threads }, source, destination)
    }

    /// Waits for the end of both connections, and returns the frames that have passed.
    pub(super) fn frames(self) -> Vec<Kind> {
        self.threads.into_iter().for_each(|thread| thread.join().unwrap());
        let passed = self.shared.passed.lock();
        passed.clone()
    }
}

impl Shared {
    fn pass(&self, mut from: &UnixStream, mut to: &UnixStream) -> io::Result<()> {
        let mut magic = [0; 8];
        from.read_exact(&mut magic)?;
        to.write_all(&magic)?;
        loop {
            let mut frame = vec![0; 5];
            from.read_exact(&mut frame)?;
            let length = u32::from_le_bytes(frame[1..].try_into().unwrap());
            frame.resize(5 + usize::try_from(length).unwrap(), 0);
            from.read_exact(&mut frame[5..])?;
            let index = self.passed.lock().len();
            match self.action {
                Action::EndAt(end) if end == index => {
                    self.sockets.iter().for_each(|socket| drop(socket.shutdown(Shutdown::Both)));
                    return Ok(());
                }
                Action::CancelAt(end) if end == index => self.cancel.cancel(),
                _ => {}
            }
            self.passed.lock().push(Kind::new(frame[0]).unwrap());
            to.write_all(&frame)?;
        }
    }
}
