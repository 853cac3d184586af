//! One named test.

use std::fmt;

use anyhow::Result;

use crate::image::GuestImage;
use crate::pair::{Link, Pair};

/// Guest with the server, and the name of the direction.
pub(crate) const WAYS: [(usize, &str); 2] = [(1, "a-to-b"), (0, "b-to-a")];

/// Returns the name of the direction in which the server is in this guest.
pub(crate) fn way(server: usize) -> &'static str {
    WAYS.iter().find(|(guest, _)| *guest == server).map_or("?", |(_, name)| name)
}

/// A named test. Its function returns a short note for the report.
pub(crate) struct Case {
    /// `group/name`, for `--only`.
    pub(crate) name: String,
    /// The test.
    pub(crate) body: Body,
    /// The test provokes kernel warnings, or checks the log itself, so the runner does not check the kernel log.
    pub(crate) ignore_kernel_log: bool,
    /// Set for a test that takes so long that it runs only on request: the hint for a user who has not requested it.
    pub(crate) slow: Option<&'static str>,
}

impl Case {
    /// Creates a test in the shared pair.
    pub(crate) fn new(name: impl Into<String>, run: impl Fn(&mut Pair, &Link) -> Result<String> + 'static) -> Self {
        Self { name: name.into(), body: Body::InPair(Box::new(run)), ignore_kernel_log: false, slow: None }
    }

    /// Creates a test that starts all its machines itself.
    pub(crate) fn alone(name: impl Into<String>, run: impl Fn(&GuestImage) -> Result<String> + 'static) -> Self {
        Self { name: name.into(), body: Body::Alone(Box::new(run)), ignore_kernel_log: false, slow: None }
    }

    /// Group of the tests that use machines of the runner.
    pub(crate) const IN_PAIR: &'static str = "in the pair";

    /// Returns the group. Cases of one group may share machines.
    pub(crate) fn group(&self) -> &str {
        match self.body {
            Body::InPair(_) => Self::IN_PAIR,
            Body::Alone(_) => self.name.split('/').next().unwrap_or_default(),
        }
    }

    /// Makes the test run only on request.
    pub(crate) fn slow(mut self, what_to_do: &'static str) -> Self {
        self.slow = Some(what_to_do);
        self
    }

    /// Makes the test run only on request unless its name is in the list.
    pub(crate) fn slow_unless(self, ordinary: &[&str], what_to_do: &'static str) -> Self {
        if ordinary.contains(&&*self.name) { self } else { self.slow(what_to_do) }
    }

    /// Returns the test as it runs without a request: skipped if it is slow, and unchanged otherwise.
    pub(crate) fn unasked(self) -> Self {
        match self.slow {
            Some(what_to_do) => Self::alone(self.name, move |_| Err(skip(what_to_do))),
            None => self,
        }
    }

    /// Switches off the check of the kernel log after the test.
    pub(crate) fn ignore_kernel_log(mut self) -> Self {
        self.ignore_kernel_log = true;
        self
    }
}

/// Function of a test, by the machines that it needs.
pub(crate) enum Body {
    /// Needs the pair of guests that most tests share, and the link between them.
    InPair(Box<InPair>),
    /// Needs only the image.
    Alone(Box<Alone>),
}

/// A test in the shared pair.
pub(crate) type InPair = dyn Fn(&mut Pair, &Link) -> Result<String>;

/// A test with machines of its own.
pub(crate) type Alone = dyn Fn(&GuestImage) -> Result<String>;

impl fmt::Debug for Case {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Case").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Reason why a test did not run; an error that the runner counts as skipped.
#[derive(Debug)]
pub(crate) struct Skipped(pub(crate) String);

impl fmt::Display for Skipped {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for Skipped {}

/// Returns the error of a test that cannot run here.
pub(crate) fn skip(reason: impl Into<String>) -> anyhow::Error {
    Skipped(reason.into()).into()
}
