//! The client's span, as W3C's trace context has it in the header `traceparent`. Pure, and nothing is allocated.

/// What a client says of its span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Traceparent {
    pub(super) trace_id: u128,
    pub(super) span_id: u64,
    /// Whether the client's trace is recorded.
    pub(super) is_sampled: bool,
}

impl Traceparent {
    /// None where `text` is not of version 00 or names no span: then there is no parent.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('-');
        let mut next = || parts.next();
        let (Some("00"), Some(trace), Some(span), Some(flags), None) =
            (next(), next(), next(), next(), next())
        else {
            return None;
        };
        let trace_id = u128::from_str_radix(trace, 16).ok()?;
        let span_id = u64::from_str_radix(span, 16).ok()?;
        let flags = u8::from_str_radix(flags, 16).ok()?;
        let names_a_span = trace_id != 0 && span_id != 0;
        names_a_span.then_some(Self { trace_id, span_id, is_sampled: flags & 1 == 1 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_bit_of_the_flags_says_whether_the_client_records() {
        let of = |flags: &str| {
            Traceparent::parse(&format!("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{flags}"))
        };
        let parent = |is_sampled| Traceparent {
            trace_id: 0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c,
            span_id: 0xb7ad_6b71_6920_3331,
            is_sampled,
        };
        assert_eq!((of("01"), of("00")), (Some(parent(true)), Some(parent(false))));
        assert_eq!((of("03"), of("02")), (Some(parent(true)), Some(parent(false))));
    }

    #[test]
    fn what_names_no_span_is_no_parent() {
        let (trace, span) = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331");
        for bad in [
            String::new(),
            "nonsense".to_owned(),
            "00---".to_owned(),
            format!("01-{trace}-{span}-01"),
            format!("00-{trace}-{span}"),
            format!("00-{trace}-{span}-01-"),
            format!("00-{trace}-{span}-100"),
            format!("00-1{trace}-{span}-01"),
            format!("00-{trace}-1{span}-01"),
            format!("00-{trace}-{span}-xy"),
            format!("00-{}-{span}-01", "0".repeat(32)),
            format!("00-{trace}-{}-01", "0".repeat(16)),
        ] {
            assert_eq!(Traceparent::parse(&bad), None, "{bad:?}");
        }
    }
}
