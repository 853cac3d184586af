//! A time in the past, as an argument of commands.

use std::str::FromStr;

use jiff::{Span, SpanRelativeTo, Timestamp};

/// A time in the past, in milliseconds since 1970: written as a duration before now, or as a time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Since(pub i64);

impl FromStr for Since {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(time) = text.parse::<Timestamp>() {
            return Ok(Self(time.as_millisecond()));
        }
        let ago = text.parse::<Span>().and_then(|ago| ago.to_duration(SpanRelativeTo::days_are_24_hours()));
        let ago = ago.map_err(|_| {
            format!("'{text}' is neither a duration, such as 10m, nor a time, such as 2027-01-31T08:00Z")
        })?;
        let time = Timestamp::now().checked_sub(ago.abs()).map_err(|_| format!("'{text}' ago is too long ago"))?;
        Ok(Self(time.as_millisecond()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_or_a_time() {
        assert_eq!("1970-01-01T00:00:02.5Z".parse(), Ok(Since(2500)));
        assert_eq!("1970-01-01T01:00:00+01:00".parse(), Ok(Since(0)));
        let now = Timestamp::now().as_millisecond();
        for (text, seconds) in [("90s", 90), ("10m", 600), ("2h 5m", 7500), ("7d", 604_800)] {
            let Since(then) = text.parse().unwrap();
            // A second is allowed for the time that passes in between.
            assert!((0..1000).contains(&(then + seconds * 1000 - now)), "{text}: {then}");
        }
        for wrong in ["", "yesterday", "10", "-", "99999999999999h", "2027-13-01T00:00Z"] {
            assert!(wrong.parse::<Since>().is_err(), "{wrong}");
        }
    }
}
