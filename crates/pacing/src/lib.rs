//! Control loops that decide when the connections of a device may send, without I/O, threads or a clock of their own:
//! the time is an argument, and the caller sends the packets.
//!
//! * [`WindowShare`]: all connections to a peer share a window, and pauses for a starved connection among them.
//! * [`RateLimiter`]: the rate of a connection whose peer has sent congestion notifications, and the time of the last
//!   notification that the connection sent itself. [`RateLimiter::is_notification_due`] decides about the next one.
//! * [`Pacer`]: applies both to the requester of a connection.
//!
//! The loops are separate from the protocol because connections share them, and several threads run connections: they
//! contain atomics and locks, which `pvrdma_roce` does not.
//!
//! # Example
//!
//! A notification halves the rate of a connection:
//!
//! ```
//! use std::time::Duration;
//!
//! use pvrdma_pacing::RateLimiter;
//! use pvrdma_roce::Congestion;
//!
//! let (config, now) = (Congestion::default(), Duration::from_secs(1));
//! let rate = RateLimiter::default();
//! assert_eq!(rate.blocked_until(now), None, "there is no limit without notifications");
//!
//! assert!(rate.notify(&config, now, 1, None));
//! rate.sent(now, 4096);
//! let takes = Duration::from_nanos(4096 * 1_000_000_000 / (config.line_rate / 2));
//! assert_eq!(rate.blocked_until(now), Some(now + takes));
//! ```

mod pacer;
mod peer_window;
mod rate_limiter;

pub use pacer::{Built, Pacer, Stop};
pub use peer_window::{PeerWindows, Runner, WindowShare};
pub use rate_limiter::RateLimiter;
