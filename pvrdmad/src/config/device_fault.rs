//! Faults of devices, as written on the command line and in a file.

use std::collections::BTreeMap;
use std::str::FromStr;

use pvrdma_rxe::faults::FaultRule;

use super::fault::FaultWord;

/// A fault on the command line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultArg {
    /// Faults of an uplink.
    Uplink(FaultWord),
    /// A fault of a device.
    Device(FaultRule),
    /// No faults.
    Off,
}

impl FromStr for FaultArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // The faults of an uplink have rates: loss:0.01, but loss/nth:5.
        let name = text.split('/').next().unwrap_or_default();
        match text {
            "off" => Ok(Self::Off),
            _ if name.contains(':') => text.parse().map(Self::Uplink),
            _ => text.parse().map(Self::Device),
        }
    }
}

impl FaultArg {
    /// Returns the faults of an uplink.
    ///
    /// # Errors
    /// There are others, or several lists.
    pub fn of_uplink(args: &[Self]) -> Result<FaultWord, String> {
        match args {
            [Self::Uplink(fault)] => Ok(*fault),
            [Self::Off] => Ok(FaultWord(None)),
            [Self::Device(rule), ..] => Err(format!("{rule} is a fault of a device (--device NAME)")),
            _ => Err("an uplink has one list of faults, such as loss:0.01/reorder:0.001".to_owned()),
        }
    }

    /// Returns the faults of a device.
    ///
    /// # Errors
    /// There are faults of an uplink, or `off` beside others.
    pub fn of_device(args: &[Self]) -> Result<Vec<FaultRule>, String> {
        if args == [Self::Off] {
            return Ok(Vec::new());
        }
        let rule = |arg: &Self| match arg {
            Self::Device(rule) => Ok(*rule),
            Self::Uplink(fault) => Err(format!("{fault} is a fault of an uplink (--network NAME)")),
            Self::Off => Err("off excludes other faults".to_owned()),
        };
        args.iter().map(rule).collect()
    }
}

/// Faults of devices in a file: a line for each fault, with the name of the device before it. Text behind `#` is a
/// comment.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct FaultFile(pub BTreeMap<String, Vec<FaultRule>>);

impl FaultFile {
    /// Size limit of a file in bytes.
    pub const MAX_LEN: u64 = 64 << 10;
}

impl FromStr for FaultFile {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.len() as u64 > Self::MAX_LEN {
            return Err(format!("a file of faults is at most {} bytes long", Self::MAX_LEN));
        }
        let mut devices = BTreeMap::<String, Vec<FaultRule>>::new();
        for (number, line) in (1..).zip(text.lines()) {
            let words: Vec<_> = line.split('#').next().unwrap_or_default().split_whitespace().collect();
            let (device, rule) = match words.as_slice() {
                [] => continue,
                [device, rule] => (*device, *rule),
                _ => return Err(format!("line {number} is not a device and a fault, such as vm0 loss/nth:5")),
            };
            let rule = rule.parse().map_err(|problem| format!("line {number}: {problem}"))?;
            devices.entry(device.to_owned()).or_default().push(rule);
        }
        Ok(Self(devices))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(text: &str) -> Vec<FaultArg> {
        text.split(' ').map(|word| word.parse().unwrap()).collect()
    }

    #[test]
    fn the_form_distinguishes_uplinks_and_devices() {
        assert!(FaultArg::of_uplink(&args("loss:0.01/seed:7")).is_ok());
        assert_eq!(FaultArg::of_uplink(&args("off")), Ok(FaultWord(None)));
        assert_eq!(FaultArg::of_device(&args("off")), Ok(Vec::new()));
        let rules = FaultArg::of_device(&args("loss/nth:5 rnr")).unwrap();
        assert_eq!(rules, ["loss/nth:5", "rnr"].map(|rule| rule.parse().unwrap()));
        for wrong in ["loss/nth:5", "loss:0.1 loss:0.2", "off off"] {
            assert!(FaultArg::of_uplink(&args(wrong)).is_err(), "{wrong}");
        }
        for wrong in ["loss:0.1", "rnr off"] {
            assert!(FaultArg::of_device(&args(wrong)).is_err(), "{wrong}");
        }
        assert!("loss:2".parse::<FaultArg>().is_err() && "lost".parse::<FaultArg>().is_err());
    }

    #[test]
    fn files() {
        let text = "# two faults of one device\nvm0 loss/nth:5\n\n  vm1\trnr/times:3 # too few receives\nvm0 rnr\n";
        let FaultFile(devices) = text.parse().unwrap();
        let words = |device: &str| devices[device].iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(words("vm0"), ["loss/nth:5/times:1", "rnr/nth:1/times:1"]);
        assert_eq!(words("vm1"), ["rnr/nth:1/times:3"]);
        assert_eq!("".parse(), Ok(FaultFile::default()));
        for wrong in ["vm0", "vm0 loss rnr", "vm0 lost", "\nvm0 loss/nth:0"] {
            let problem = wrong.parse::<FaultFile>().unwrap_err();
            assert!(problem.contains(if wrong.starts_with('\n') { "line 2" } else { "line 1" }), "{problem}");
        }
        assert!("#".repeat(65_537).parse::<FaultFile>().is_err());
    }
}
