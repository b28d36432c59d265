-- Makes wrk send the same requests as load.c. They are prepared from the template in advance, so that each costs only a
-- table look-up. 4096 exceeds the number of connections: no two requests in flight are the same.
local requests, at, count = {}, 0, 4096

function init()
   local file = assert(io.open(os.getenv("BENCH_REQUEST"), "rb"))
   local template, marker, first = file:read("*a"), os.getenv("BENCH_MARKER"), tonumber(os.getenv("BENCH_FIRST"))
   file:close()
   for i = 1, count do
      requests[i] = template:gsub(marker, string.format("1%0" .. (#marker - 1) .. ".0f", first + i))
   end
end

function request()
   at = at % count + 1
   return requests[at]
end

function done(summary, latency)
   local e = summary.errors
   print()
   print(string.format(
      '{"requests":%d,"elapsed_s":%.6f,"bytes":%d,"faults":%d,"p50_us":%.1f,"p99_us":%.1f,"max_us":%.1f}',
      summary.requests, summary.duration / 1e6, summary.bytes, e.connect + e.read + e.write + e.status + e.timeout,
      latency:percentile(50), latency:percentile(99), latency.max))
end
