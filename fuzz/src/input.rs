//! Sequences of a bounded length in inputs of all targets.

use arbitrary::{Arbitrary, Unstructured};

/// Most steps of one input.
const MAX_STEPS: usize = 120;

/// A sequence of steps, as long as the input has bytes.
#[derive(Debug)]
pub struct Steps<T>(pub Vec<T>);

impl<'a, T: Arbitrary<'a>> Arbitrary<'a> for Steps<T> {
    fn arbitrary(input: &mut Unstructured<'a>) -> arbitrary::Result<Self> {
        let mut steps = Vec::new();
        while !input.is_empty() && steps.len() < MAX_STEPS {
            steps.push(input.arbitrary()?);
        }
        Ok(Self(steps))
    }
}

/// Up to 63 of something.
#[derive(Debug)]
pub struct Many<T>(pub Vec<T>);

impl<'a, T: Arbitrary<'a>> Arbitrary<'a> for Many<T> {
    fn arbitrary(input: &mut Unstructured<'a>) -> arbitrary::Result<Self> {
        let count = u8::arbitrary(input)? & 63;
        (0..count).map(|_| input.arbitrary()).collect::<arbitrary::Result<_>>().map(Self)
    }
}
