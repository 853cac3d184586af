//! Faults of the whole device: a task of the engine applies them, because queue pairs that cause them hold locks.

use std::fmt;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use pvrdma_verbs::VerbsError;

use super::armed::FaultStatus;
use super::point::{FaultPoint, Review};
use super::rule::FaultRule;
use crate::budget::Budget;
use crate::engine::Engine;
use crate::share::Share;
use crate::task::{Runnable, Task};
use crate::timer::TimerKey;

/// Change of a device that a fault causes, beyond its queue pairs and its GID table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceEffect {
    /// The link goes up or down.
    Link {
        /// `true`: up.
        up: bool,
    },
    /// The GID table has changed.
    GidTable,
    /// The device fails.
    Fatal,
}

/// Applies an effect to a device.
type Apply = dyn Fn(DeviceEffect) + Send + Sync;

#[derive(Debug, Default)]
struct State {
    /// The link was set down.
    link_down: bool,
    timer: Option<TimerKey>,
}

/// Applies the faults of a device.
struct Effects {
    point: Arc<FaultPoint>,
    engine: Arc<Engine>,
    task: Arc<Task>,
    apply: Mutex<Option<Arc<Apply>>>,
    // Locked while effects are applied, so that they are applied in order.
    state: Mutex<State>,
}

impl fmt::Debug for Effects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Effects").field("point", &self.point).finish_non_exhaustive()
    }
}

impl Effects {
    /// Applies the state of the device according to its rules.
    fn follow(&self, state: &mut State, review: &Review) {
        let apply = self.apply.lock().clone();
        let apply = |effect| apply.iter().for_each(|apply| apply(effect));
        if std::mem::replace(&mut state.link_down, review.link_down) != review.link_down {
            apply(DeviceEffect::Link { up: !review.link_down });
        }
        if review.gids_changed {
            apply(DeviceEffect::GidTable);
        }
        if review.fatal {
            apply(DeviceEffect::Fatal);
            self.point.has_failed(&self.task, self.engine.now());
            // The next run finds the time of the next change, and changes since the review.
            self.task.schedule();
        }
        self.engine.set_timer(&self.task, review.next, &mut state.timer);
    }

    /// Ends the effects if the rules of the handle have ended for good. Does not wait for a thread that applies
    /// effects, which may take long: that thread calls this afterwards.
    fn finish(&self) {
        if !self.point.is_of_handle(&self.task)
            && let Some(mut state) = self.state.try_lock()
        {
            self.follow(&mut state, &Review::default());
        }
    }
}

impl Runnable for Effects {
    fn run(&self, _: &mut Budget) -> bool {
        let mut state = self.state.lock();
        let review = self.point.review(&self.task, self.engine.now());
        self.follow(&mut state, &review);
        drop(state);
        self.finish();
        false
    }
}

/// Handle for the faults of a device. They last until it is dropped or replaced by a later handle for the same device,
/// across restarts of the device's driver.
///
/// The drop of the handle sets a link up that a fault keeps down: on the calling thread, or on the one that applies an
/// effect at that moment.
#[derive(Debug)]
pub struct DeviceFaults(Arc<Effects>);

impl DeviceFaults {
    /// Highest number of rules of a device.
    pub const MAX_RULES: usize = 64;

    pub(crate) fn new(point: Arc<FaultPoint>, engine: &Arc<Engine>, share: &Arc<Share>) -> Self {
        let effects = Arc::new_cyclic(|me: &Weak<Effects>| Effects {
            task: Task::new(engine.ready_queue(), share, me.clone() as _),
            engine: Arc::clone(engine),
            apply: Mutex::default(),
            state: Mutex::default(),
            point,
        });
        effects.point.take_over(&effects.task, engine.now());
        Self(effects)
    }

    /// Replaces the rules. All counts begin anew, faults of the device end, and revoked keys become valid again.
    ///
    /// # Errors
    /// There are too many rules, or a later handle has replaced this one; nothing has changed then.
    pub fn set(&self, rules: &[FaultRule]) -> Result<(), VerbsError> {
        if rules.len() > Self::MAX_RULES {
            return Err(VerbsError::Exhausted("faults of this device"));
        }
        let Effects { point, task, engine, .. } = &*self.0;
        if point.set(task, rules, engine.now()) { Ok(()) } else { Err(VerbsError::Gone) }
    }

    /// Applies faults of the device by `apply`. A worker, or the thread that drops the handle, calls it with no lock
    /// but the one that keeps the calls in order. A call that has begun may end after the handle is dropped.
    pub fn apply_by(&self, apply: impl Fn(DeviceEffect) + Send + Sync + 'static) {
        *self.0.apply.lock() = Some(Arc::new(apply));
    }

    /// Returns the rules in force.
    pub fn status(&self) -> Vec<FaultStatus> {
        self.0.point.status()
    }
}

impl Drop for DeviceFaults {
    fn drop(&mut self) {
        let effects = &*self.0;
        effects.point.end(&effects.task, effects.engine.now());
        effects.finish();
    }
}

impl Drop for Effects {
    fn drop(&mut self) {
        self.engine.set_timer(&self.task, None, &mut self.state.get_mut().timer);
    }
}
