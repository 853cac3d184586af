//! Congestion control of a sender: the reaction point of DCQCN (Zhu et al., "Congestion Control for Large-Scale RDMA
//! Deployments", SIGCOMM 2015), without a clock of its own.
//!
//! A QP without notifications has no state and no limit. The first notification creates a [`ReactionPoint`], which cuts
//! the rate and lets it grow back; once it is back at line rate, the state is dropped. Nothing runs in between: each
//! call first makes up for the updates that fell due since the last one.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::split_mix::SplitMix64;

/// Parameters of congestion control. The times are four times those of the paper, because a software sender observes
/// and reacts later than an adapter; the notification point is as fast as the paper's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Congestion {
    /// Minimum time between two notifications for a QP that receives marked packets.
    pub cnp_interval: Duration,
    /// DSCP of notifications, 6 bits.
    pub cnp_dscp: u8,
    /// Priority (PCP, 3 bits) of notifications in packets with a tag.
    pub cnp_priority: u8,
    /// Rate of a QP before its first cut, in bytes per second.
    pub line_rate: u64,
    /// Lower bound of the rate, in bytes per second.
    pub min_rate: u64,
    /// Shortest time between two cuts.
    pub cut_interval: Duration,
    /// Interval at which the estimate of congestion (alpha) is updated.
    pub alpha_interval: Duration,
    /// Weight of a new observation in alpha, as the divisor "1/g".
    pub alpha_weight: u32,
    /// Time without a cut after which the rate grows, varied by up to a tenth.
    pub increase_interval: Duration,
    /// Number of bytes after which the rate grows as well.
    pub increase_bytes: u64,
    /// Number of increases of each kind that go half the way back to the target rate, before the target itself grows
    /// ("F").
    pub recovery_steps: u32,
    /// Growth of the target rate, in bytes per second ("R_AI").
    pub additive_increase: u64,
    /// Growth of the target rate once both time and bytes have passed the recovery steps ("R_HAI").
    pub hyper_increase: u64,
}

/// Bytes per second of a megabit per second.
pub const MEGABIT: u64 = 125_000;

impl Default for Congestion {
    fn default() -> Self {
        Self {
            cnp_interval: Duration::from_micros(50),
            cnp_dscp: 48,
            cnp_priority: 6,
            line_rate: 10_000 * MEGABIT,
            min_rate: 10 * MEGABIT,
            cut_interval: Duration::from_micros(200),
            alpha_interval: Duration::from_micros(220),
            alpha_weight: 256,
            increase_interval: Duration::from_micros(220),
            increase_bytes: 10 << 20,
            recovery_steps: 5,
            additive_increase: 40 * MEGABIT,
            hyper_increase: 400 * MEGABIT,
        }
    }
}

impl Congestion {
    /// Defaults for a 100 Mb/s line with 5 ms of delay that marks packets behind a queue of 60 KB, and for hosts whose
    /// own links have 1 Gb/s. A round trip takes 10 to 20 ms there instead of 50 us, and a growth of 1 Mb/s is large.
    /// The values were searched in the simulation of `tests/pair/dumbbell.rs`.
    #[must_use]
    pub fn slow_line() -> Self {
        let ms = Duration::from_millis;
        Self {
            line_rate: 1000 * MEGABIT,
            min_rate: MEGABIT,
            cnp_interval: ms(2),
            cut_interval: ms(25),
            alpha_interval: ms(26),
            alpha_weight: 320,
            increase_interval: ms(150),
            recovery_steps: 4,
            additive_increase: MEGABIT,
            hyper_increase: MEGABIT,
            ..Self::default()
        }
    }
}

/// Fixed-point unit of the estimate of congestion.
const ALPHA_ONE: u32 = 1 << 16;
/// Lateness for which a sender may catch up, because the timers of a software sender are not exact.
const LATENESS: Duration = Duration::from_micros(200);
/// Number of periods that are made up for individually. After a longer silence, the estimate has decayed to nothing.
const MEMORY: u32 = 2048;

/// Rate of a QP that received a congestion notification.
#[derive(Clone, Debug)]
pub struct ReactionPoint {
    config: Congestion,
    /// Current rate in bytes per second.
    rate: u64,
    /// Target rate, up to which the rate grows back.
    target: u64,
    alpha: u32,
    /// A notification arrived since the last update of `alpha`.
    notified: bool,
    alpha_due: Duration,
    /// Time after which the rate grows, drawn at each cut within a tenth of the configured value, because senders that
    /// were cut together must not grow together.
    increase_interval: Duration,
    increase_due: Duration,
    random: SplitMix64,
    /// Increases by time and by bytes since the last cut.
    by_time: u32,
    by_bytes: u32,
    /// Bytes since the last increase by bytes.
    bytes: u64,
    last_cut: Option<Duration>,
    /// Time at which the next packet may be sent.
    next: Duration,
}

impl ReactionPoint {
    /// Creates the state of a QP that was at line rate until now. QPs that share a line need different seeds.
    #[inline]
    pub fn new(config: &Congestion, now: Duration, seed: u64) -> Self {
        Self {
            config: *config,
            rate: config.line_rate,
            target: config.line_rate,
            alpha: ALPHA_ONE,
            notified: false,
            alpha_due: now.saturating_add(config.alpha_interval),
            increase_interval: config.increase_interval,
            increase_due: now.saturating_add(config.increase_interval),
            random: SplitMix64::new(seed),
            by_time: 0,
            by_bytes: 0,
            bytes: 0,
            last_cut: None,
            next: now,
        }
    }

    /// Current rate in bytes per second.
    #[inline]
    pub const fn rate(&self) -> u64 {
        self.rate
    }

    /// Returns `true` if the rate is back at line rate, so that the state can be dropped.
    #[inline]
    pub const fn has_recovered(&self) -> bool {
        self.last_cut.is_some() && self.rate >= self.config.line_rate
    }

    /// Handles a congestion notification. Returns `true` if the rate was cut.
    #[inline]
    pub fn notify(&mut self, now: Duration) -> bool {
        self.advance(now);
        self.notified = true;
        if self.last_cut.is_some_and(|last| now < last.saturating_add(self.config.cut_interval)) {
            return false;
        }
        let cut = u128::from(self.rate) * u128::from(self.alpha) / u128::from(2 * ALPHA_ONE);
        self.target = self.rate;
        self.rate = self.rate.saturating_sub(u64::try_from(cut).unwrap_or(u64::MAX)).max(self.config.min_rate);
        (self.by_time, self.by_bytes, self.bytes) = (0, 0, 0);
        self.draw_interval();
        self.increase_due = now.saturating_add(self.increase_interval);
        self.last_cut = Some(now);
        true
    }

    fn draw_interval(&mut self) {
        const PARTS: u32 = 1 << 10;
        let [low, high, ..] = self.random.draw().to_le_bytes();
        let (interval, part) = (self.config.increase_interval, u32::from(u16::from_le_bytes([low, high])) % PARTS);
        self.increase_interval = (interval - interval / 10).saturating_add(interval / 5 / PARTS * part);
    }

    /// Returns the time at which the next packet may be sent, or `None` if that is now.
    #[inline]
    pub fn blocked_until(&mut self, now: Duration) -> Option<Duration> {
        self.advance(now);
        (self.next > now).then_some(self.next)
    }

    /// Accounts for a packet that was sent.
    #[inline]
    pub fn sent(&mut self, now: Duration, bytes: u64) {
        let takes = u128::from(bytes) * 1_000_000_000 / u128::from(self.rate.max(1));
        let takes = Duration::from_nanos(u64::try_from(takes).unwrap_or(u64::MAX));
        self.next = self.next.max(now.saturating_sub(LATENESS)).saturating_add(takes);
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes >= self.config.increase_bytes {
            self.bytes = 0;
            self.by_bytes = self.by_bytes.saturating_add(1);
            self.increase();
        }
    }

    /// Makes up for the updates that fell due since the last call.
    fn advance(&mut self, now: Duration) {
        let mut left = MEMORY;
        while self.alpha_due <= now {
            let seen = if std::mem::take(&mut self.notified) { ALPHA_ONE } else { 0 };
            let weight = self.config.alpha_weight.max(1);
            self.alpha = self.alpha.saturating_sub(self.alpha / weight).saturating_add(seen / weight).min(ALPHA_ONE);
            self.alpha_due = self.alpha_due.saturating_add(self.config.alpha_interval.max(Duration::from_micros(1)));
            left = left.saturating_sub(1);
            if left == 0 {
                self.alpha = 0;
                self.alpha_due = now.saturating_add(self.config.alpha_interval);
                break;
            }
        }
        left = MEMORY;
        while self.increase_due <= now {
            self.by_time = self.by_time.saturating_add(1);
            self.increase();
            self.increase_due = self.increase_due.saturating_add(self.increase_interval.max(Duration::from_micros(1)));
            left = left.saturating_sub(1);
            if left == 0 || self.rate >= self.config.line_rate {
                self.rate = self.config.line_rate;
                self.increase_due = now.saturating_add(self.increase_interval);
                break;
            }
        }
    }

    fn increase(&mut self) {
        let steps = self.config.recovery_steps;
        self.target = self.target.saturating_add(match (self.by_time > steps, self.by_bytes > steps) {
            (false, false) => 0,
            (true, true) => self.config.hyper_increase,
            _ => self.config.additive_increase,
        });
        let line = self.config.line_rate;
        self.target = self.target.min(line);
        self.rate = self.rate.midpoint(self.target);
        // Covering half of the distance each time would never reach the line rate, so the last percent is skipped.
        if self.rate >= line.saturating_sub(line / 100) {
            self.rate = line;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Duration = Duration::from_secs(7);

    fn us(count: u64) -> Duration {
        Duration::from_micros(count)
    }

    fn cut_once() -> (Congestion, ReactionPoint) {
        let config = Congestion::default();
        let mut point = ReactionPoint::new(&config, START, 1);
        assert!(!point.has_recovered());
        assert!(point.notify(START));
        (config, point)
    }

    #[test]
    fn cuts_are_halves_at_first_and_not_too_often() {
        let (config, mut point) = cut_once();
        assert_eq!(point.rate(), config.line_rate / 2);
        assert!(!point.notify(START + us(199)));
        assert_eq!(point.rate(), config.line_rate / 2);
        assert!(point.notify(START + us(200)));
        assert_eq!(point.rate(), config.line_rate / 4);
        // With a notification in each period, the estimate stays high and cuts continue down to the minimum rate.
        for step in 2..40 {
            assert!(point.notify(START + us(200 * step)));
        }
        assert!(point.rate() >= config.min_rate && point.rate() < config.min_rate * 2, "{}", point.rate());
    }

    #[test]
    fn rare_notifications_cut_less() {
        let (config, mut point) = cut_once();
        // A silence of 1,000 periods.
        let later = START + config.alpha_interval * 1000;
        let rate = {
            assert_eq!(point.blocked_until(later), None);
            point.rate()
        };
        assert!(point.notify(later));
        let cut = rate - point.rate();
        assert!(cut > 0 && cut < rate / 40, "{cut} of {rate}");
    }

    #[test]
    fn time_brings_the_rate_back() {
        let (config, mut point) = cut_once();
        let (line, interval) = (config.line_rate, point.increase_interval);
        let mut rate_at = |periods: u32| {
            point.blocked_until(START + interval * periods);
            point.rate()
        };
        // Each step goes half the way: the target is the rate before the cut.
        assert_eq!(rate_at(0), line / 2);
        assert_eq!(rate_at(1), line / 4 * 3);
        assert_eq!(rate_at(2), line / 8 * 7);
        assert!(rate_at(5) < line);
        assert_eq!(rate_at(7), line);
        assert!(point.has_recovered());
    }

    #[test]
    fn the_aim_grows_by_time_and_faster_by_both() {
        let (config, mut point) = cut_once();
        assert!(point.notify(START + config.cut_interval));
        let (start, target) = (START + config.cut_interval, config.line_rate / 2);
        let interval = point.increase_interval;
        let at = |period: u32| start + interval * period;
        point.blocked_until(at(5));
        assert_eq!(point.target, target);
        point.blocked_until(at(6));
        assert_eq!(point.target, target + config.additive_increase);
        // The increases by bytes alone have not passed their recovery steps yet.
        for _ in 0..5 {
            point.sent(at(6), config.increase_bytes);
        }
        let after_bytes = point.target;
        assert_eq!(after_bytes, target + 6 * config.additive_increase);
        point.sent(at(6), config.increase_bytes);
        assert_eq!(point.target, after_bytes + config.hyper_increase);
    }

    #[test]
    fn who_is_cut_together_does_not_grow_together() {
        let config = Congestion::default();
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..100 {
            let mut point = ReactionPoint::new(&config, START, seed);
            for cut in 0..4 {
                assert!(point.notify(START + config.cut_interval * cut));
                seen.insert(point.increase_interval);
            }
        }
        let tenth = config.increase_interval / 10;
        let (least, most) = (config.increase_interval - tenth, config.increase_interval + tenth);
        assert!(seen.len() > 200 && seen.iter().all(|interval| (least..=most).contains(interval)), "{seen:?}");
        assert!(seen.first() < Some(&(least + tenth / 10)) && seen.last() > Some(&(most - tenth / 10)), "{seen:?}");
    }

    #[test]
    fn packets_leave_at_the_rate() {
        let (config, mut point) = cut_once();
        let packet = 4096;
        let takes = Duration::from_nanos(packet * 1_000_000_000 / (config.line_rate / 2));
        assert_eq!(point.blocked_until(START), None);
        for count in 1..10 {
            point.sent(START, packet);
            assert_eq!(point.blocked_until(START), Some(START + takes * count));
        }
        let now = START + takes * 9;
        assert_eq!(point.blocked_until(now), None);
        // A late sender may catch up with the inaccuracy of timers, but not with all of its delay.
        let late = now + LATENESS / 2;
        point.sent(late, packet);
        assert_eq!(point.blocked_until(late), None);
        let late = START + Duration::from_millis(100);
        point.blocked_until(late);
        let takes = Duration::from_nanos(packet * 1_000_000_000 / point.rate());
        let mut free = 0;
        while point.blocked_until(late).is_none() {
            point.sent(late, packet);
            free += 1;
        }
        assert_eq!(free, LATENESS.as_nanos() / takes.as_nanos() + 1);
    }

    #[test]
    fn any_time_and_any_parameters_end_soon() {
        let zero = Congestion {
            line_rate: 0,
            min_rate: 0,
            cut_interval: Duration::ZERO,
            alpha_interval: Duration::ZERO,
            alpha_weight: 0,
            increase_interval: Duration::ZERO,
            increase_bytes: 0,
            recovery_steps: 0,
            additive_increase: u64::MAX,
            hyper_increase: u64::MAX,
            ..Congestion::default()
        };
        let slow = Congestion { line_rate: u64::MAX, additive_increase: 1, ..Congestion::default() };
        for config in [zero, slow] {
            let mut point = ReactionPoint::new(&config, Duration::ZERO, 1);
            for now in [Duration::ZERO, us(1), START, Duration::MAX, Duration::MAX] {
                point.notify(now);
                point.sent(now, u64::MAX);
                point.blocked_until(now);
            }
        }
        let (_, mut point) = cut_once();
        point.blocked_until(START + Duration::from_secs(86_400 * 365));
        assert!(point.has_recovered());
    }
}
