//! Headers of tar entries: blocks of 512 bytes, and the extended headers of PAX.

use super::refusal::Reason;

/// Size of a block.
pub(super) const BLOCK: usize = 512;

/// Fields of a header block, before extended headers are applied.
#[derive(Clone, Debug)]
pub(super) struct Header {
    pub name: Vec<u8>,
    pub link: Vec<u8>,
    pub size: u64,
    pub meta: Meta,
    /// Kind of the entry.
    pub flag: u8,
}

/// Owner, permissions and time of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Meta {
    /// Permission bits, at most 0o7777.
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    /// Seconds since 1970.
    pub modified: u64,
}

impl Meta {
    /// Owner and permissions of a folder that the archive does not contain itself.
    pub(super) const FOLDER: Self = Self { mode: 0o755, uid: 0, gid: 0, modified: 0 };
}

impl Header {
    /// Parses a block; returns `None` for a block of zeros, which ends an archive.
    ///
    /// # Errors
    /// Its checksum is wrong, or a number is invalid.
    pub(super) fn parse(block: &[u8; BLOCK]) -> Result<Option<Self>, Reason> {
        if block.iter().all(|&byte| byte == 0) {
            return Ok(None);
        }
        let field = |at: usize, length: usize| block.get(at..).and_then(|rest| rest.get(..length)).unwrap_or_default();
        // The checksum counts its own field as blanks.
        let sum = |range: &[u8]| range.iter().map(|&byte| u64::from(byte)).sum::<u64>();
        let blanks = 8 * u64::from(b' ');
        let expected = sum(block).checked_sub(sum(field(148, 8))).and_then(|sum| sum.checked_add(blanks));
        if number(field(148, 8)).ok() != expected {
            return Err(Reason::Header(
                "the checksum of its header is wrong: this is no tar archive, or a damaged one",
            ));
        }
        let mut name = text(field(0, 100)).to_vec();
        // In GNU's format these bytes have another meaning.
        let prefix = text(field(345, 155));
        if field(257, 6) == b"ustar\0" && !prefix.is_empty() {
            name = [prefix, b"/", &name].concat();
        }
        Ok(Some(Self {
            name,
            link: text(field(157, 100)).to_vec(),
            size: number(field(124, 12))?,
            meta: Meta {
                mode: u16::try_from(number(field(100, 8))? & 0o7777).unwrap_or_default(),
                uid: id(number(field(108, 8))?)?,
                gid: id(number(field(116, 8))?)?,
                modified: number(field(136, 12))?,
            },
            flag: *block.get(156).unwrap_or(&0),
        }))
    }
}

/// Returns a field without the zero bytes behind it.
fn text(field: &[u8]) -> &[u8] {
    field.split(|&byte| byte == 0).next().unwrap_or_default()
}

/// Parses a number: octal digits, or GNU's binary form, whose first bit is set.
fn number(field: &[u8]) -> Result<u64, Reason> {
    const WRONG: Reason = Reason::Header("a number in its header is invalid");
    if let Some((&first, rest)) = field.split_first()
        && first & 0x80 != 0
    {
        // A negative number has further bits set.
        let start = u64::from(first & 0x7f);
        return rest
            .iter()
            .try_fold(start, |value, &byte| value.checked_mul(256)?.checked_add(byte.into()))
            .ok_or(WRONG);
    }
    let digits = text(field).trim_ascii();
    digits.iter().try_fold(0u64, |value, &byte| match byte {
        b'0'..=b'7' => value.checked_mul(8).and_then(|value| value.checked_add(u64::from(byte - b'0'))).ok_or(WRONG),
        _ => Err(WRONG),
    })
}

fn id(number: u64) -> Result<u32, Reason> {
    u32::try_from(number).map_err(|_| Reason::Header("its owner is no number of 32 bits"))
}

/// Fields that extended headers replace in the next entry.
#[derive(Clone, Debug, Default)]
pub(super) struct Extended {
    pub name: Option<Vec<u8>>,
    pub link: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u32>,
    gid: Option<u32>,
    modified: Option<u64>,
}

impl Extended {
    /// Adds the records of a PAX header: `LENGTH KEY=VALUE\n`.
    ///
    /// # Errors
    /// A record is malformed, or describes a sparse file.
    pub(super) fn add_records(&mut self, mut records: &[u8]) -> Result<(), Reason> {
        const WRONG: Reason = Reason::Header("its extended header is malformed");
        while !records.is_empty() {
            let blank = records.iter().position(|&byte| byte == b' ').ok_or(WRONG)?;
            let length = decimal(records.get(..blank).unwrap_or_default()).ok_or(WRONG)?;
            let length = usize::try_from(length).map_err(|_| WRONG)?;
            let (record, rest) = records.split_at_checked(length).ok_or(WRONG)?;
            let record = record.get(blank.saturating_add(1)..).and_then(|record| record.strip_suffix(b"\n"));
            let record = record.ok_or(WRONG)?;
            let equals = record.iter().position(|&byte| byte == b'=').ok_or(WRONG)?;
            let (key, value) = record.split_at_checked(equals).ok_or(WRONG)?;
            self.add(key, value.get(1..).unwrap_or_default())?;
            records = rest;
        }
        Ok(())
    }

    fn add(&mut self, key: &[u8], value: &[u8]) -> Result<(), Reason> {
        const WRONG: Reason = Reason::Header("a number in its extended header is invalid");
        let number = || decimal(value).ok_or(WRONG);
        match key {
            b"path" => self.name = Some(value.to_vec()),
            b"linkpath" => self.link = Some(value.to_vec()),
            b"size" => self.size = Some(number()?),
            b"uid" => self.uid = Some(id(number()?)?),
            b"gid" => self.gid = Some(id(number()?)?),
            // Fractions are dropped, and so are times before 1970.
            b"mtime" => self.modified = value.split(|&byte| byte == b'.').next().and_then(decimal),
            key if key.starts_with(b"GNU.sparse") => return Err(Reason::Sparse),
            // Others, such as extended attributes, are not needed by tests.
            _ => {}
        }
        Ok(())
    }

    /// Returns `true` if it replaces nothing.
    pub(super) fn is_empty(&self) -> bool {
        let names = self.name.is_none() && self.link.is_none();
        names && self.size.is_none() && self.uid.is_none() && self.gid.is_none() && self.modified.is_none()
    }

    /// Replaces the fields of a header.
    pub(super) fn apply(self, header: &mut Header) {
        header.name = self.name.unwrap_or_else(|| std::mem::take(&mut header.name));
        header.link = self.link.unwrap_or_else(|| std::mem::take(&mut header.link));
        header.size = self.size.unwrap_or(header.size);
        header.meta.uid = self.uid.unwrap_or(header.meta.uid);
        header.meta.gid = self.gid.unwrap_or(header.meta.gid);
        header.meta.modified = self.modified.unwrap_or(header.meta.modified);
    }
}

fn decimal(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(digits).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_octal_or_binary() {
        assert_eq!(number(b"0000755\0").unwrap(), 0o755);
        assert_eq!(number(b"   755 \0").unwrap(), 0o755);
        assert_eq!(number(b"\x80\0\0\0\0\0\0\x01\0\0\0\0").unwrap(), 1 << 32);
        assert_eq!(number(b"\0\0\0\0\0\0\0\0").unwrap(), 0);
        for field in [b"00009\0\0\0".as_slice(), b"-1\0", b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"] {
            assert!(number(field).is_err(), "{field:?}");
        }
    }

    #[test]
    fn malformed_records_are_refused() {
        let add = |records: &[u8]| Extended::default().add_records(records);
        assert!(add(b"12 path=a/b\n19 comment=ignored\n").is_ok());
        for records in [
            b"12 path=a/b".as_slice(),
            b"99 path=a/b\n",
            b"0 path=a/b\n",
            b"3 path=a/b\n",
            b"path=a/b\n",
            b"18446744073709551616 a=b\n",
            b"9 size=x\n",
            b"99999999999999999999",
        ] {
            assert!(matches!(add(records), Err(Reason::Header(_))), "{}", String::from_utf8_lossy(records));
        }
        assert!(matches!(add(b"22 GNU.sparse.major=1\n"), Err(Reason::Sparse)));
    }
}
