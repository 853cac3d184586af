//! Lists of ports.

use std::str::FromStr;

use super::keys::deserialize_from_str;

/// Maximum number of ports of a device.
const MOST: usize = 32;

/// Ports with `+` between them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ports(pub Vec<u16>);

impl FromStr for Ports {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let port = |text: &str| {
            text.parse().ok().filter(|port| *port != 0).ok_or_else(|| format!("'{text}' is not a port (1 to 65535)"))
        };
        let mut ports = text.split('+').map(port).collect::<Result<Vec<u16>, _>>()?;
        ports.sort_unstable();
        ports.dedup();
        if ports.len() > MOST { Err(format!("more than {MOST} ports")) } else { Ok(Self(ports)) }
    }
}

deserialize_from_str!(Ports);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_a_short_list_of_numbers() {
        assert_eq!("4420+18515+4420".parse(), Ok(Ports(vec![4420, 18515])));
        let many: Vec<_> = (1..=33).map(|port: u16| port.to_string()).collect();
        assert!(many[1..].join("+").parse::<Ports>().is_ok());
        for text in ["", "0", "65536", "4420,1", "4420+", "nvme", &many.join("+")] {
            assert!(text.parse::<Ports>().is_err(), "{text}");
        }
    }
}
