//! Start of the program that replaces this one.

use std::env;
use std::io;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use pvrdma_base::threads::{self, ThreadKind};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::outcome::{Event, Outcome};
use crate::supervisor::Supervisor;

/// Option that makes a program replace the running daemon.
const OPTION: &str = "--take-over";

/// Variables of the environment that concern this process alone.
const OWN_VARIABLES: [&str; 4] = ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "WATCHDOG_PID"];

/// Time for a program that was killed to end, and for the networks to be served here again.
const KILLED: Duration = Duration::from_secs(6);

/// Time for a program that was refused to end.
const REFUSED: Duration = Duration::from_secs(2);

impl Supervisor {
    /// Starts the installed program with the arguments of this one, so that it replaces this daemon. Returns the
    /// outcome for the networks.
    ///
    /// # Errors
    /// The program cannot be started, ends, or does not continue. This daemon serves all networks as before.
    pub(crate) fn start_next(&self) -> Result<Outcome, String> {
        self.is_replaceable()?;
        let installed = self.program.as_ref().and_then(|program| program.installed.as_ref());
        let program = installed.ok_or("the path of the installed program is not known")?;
        let (tell, events) = channel();
        if !self.starter.wait(tell.clone()) {
            return Err("another program is about to replace the daemon".to_owned());
        }
        let done = self.run_next(Command::new(program), tell, &events);
        self.starter.end();
        done
    }

    fn run_next(
        &self,
        mut program: Command,
        tell: Sender<Event>,
        events: &std::sync::mpsc::Receiver<Event>,
    ) -> Result<Outcome, String> {
        program.args(env::args_os().skip(1).filter(|argument| argument != OPTION)).arg(OPTION);
        OWN_VARIABLES.iter().for_each(|name| {
            program.env_remove(name);
        });
        let mut child = program.stdin(Stdio::null()).spawn().map_err(|error| format!("the new program: {error}"))?;
        // A descriptor in place of the number, which another process may get.
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).map_err(|errno| {
            let _ = child.kill();
            format!("the new program: {errno}")
        })?;
        threads::spawn(ThreadKind::Supervisor, "next daemon", move || wait(child, &tell))
            .map_err(|error| error.to_string())?;
        match events.recv_timeout(self.timing.take_over.saturating_mul(2)) {
            Ok(Event::Outcome(outcome)) => {
                // A program that was refused ends by itself, unless it hangs.
                if !outcome.replaced && events.recv_timeout(REFUSED).is_err() {
                    let _ = pidfd_send_signal(&pidfd, Signal::KILL);
                }
                Ok(outcome)
            }
            Ok(Event::Ended(status)) => {
                // A program that refuses sends its reasons and ends. Its end can be noticed before the thread that
                // reads the reasons has told the outcome, which says more.
                self.starter.wait_told(KILLED);
                match events.try_recv() {
                    Ok(Event::Outcome(outcome)) => Ok(outcome),
                    _ => Err(ended(status)),
                }
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                // After this, no replacement begins: the end of the program closes its connection.
                let _ = pidfd_send_signal(&pidfd, Signal::KILL);
                match events.recv_timeout(KILLED) {
                    // The outcome arrived before the program was killed.
                    Ok(Event::Outcome(outcome)) => Ok(outcome),
                    _ => Err("the new program does not continue, and was killed".to_owned()),
                }
            }
        }
    }
}

/// Waits for the end of the program. If the program replaces this one, this process ends first.
fn wait(mut child: Child, tell: &Sender<Event>) {
    let status = child.wait();
    let _ = tell.send(Event::Ended(status));
}

fn ended(status: io::Result<ExitStatus>) -> String {
    match status {
        Ok(status) => format!("the new program ended: {status} (the daemon's log has its reasons)"),
        Err(error) => format!("the new program ended: {error}"),
    }
}
