//! Continuing after a pause of the requester's host.

use std::time::Duration;

use super::Requester;
use super::loss_recovery::Setback;
use super::timers::Timer;

impl Requester {
    /// Starts the timers anew after a pause, in which the requester could neither send nor receive. Goes back to the
    /// oldest packet without an acknowledgement or response, because those that arrived meanwhile are lost. Spends no
    /// retry.
    pub fn resume(&mut self, now: Duration) {
        if self.ended || self.snd.una == self.snd.max || self.timers.is_running(Timer::RnrBackoff) {
            return;
        }
        // The network has lost nothing, so its window stays.
        self.go_back(now, self.snd.una, Setback::NotReady);
        self.restart_timers(now);
    }
}
