#!lua name=penstock_1
-- Functions for limits that all hosts share. The version is part of every name: hosts of two versions can run side by side.
--
-- A lease hands tokens of a key's two buckets (requests and units) to a host, which spends them without asking again. Amounts
-- are seconds of refill, as in core/limits. A lease of slot k may be spent until slot k + 1 ends. While tokens are lent the
-- bucket holds so much less, so what is there and what is lent never exceed one second's worth together: any t seconds admit
-- at most rate * (t + 1), over all hosts.
local SLOT = 0.5
-- Records of keys that are not used any more expire. After two slots a record equals a new one.
local KEPT_MS = 5000
-- Grants are remembered this long, to know each host's share.
local MEMORY_S = 5
-- Sums of fractions are not exact.
local TOLERANCE = 1e-6
local FIELDS = '<ddddddddd'

local function clock()
  local time = redis.call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1e6
end

-- edge[i]: when the bucket would have been empty. cur[i], prev[i]: lent in this slot and the one before, less what was
-- reported as spent.
local function load(key, now)
  local raw = redis.call('GET', key)
  if not raw then
    return {edge = {0, 0}, cur = {0, 0}, prev = {0, 0}, slot = math.floor(now / SLOT), granted = 0, at = now}
  end
  local f = {struct.unpack(FIELDS, raw)}
  return {edge = {f[1], f[2]}, slot = f[3], cur = {f[4], f[5]}, prev = {f[6], f[7]}, granted = f[8], at = f[9]}
end

local function save(key, r)
  local raw = struct.pack(FIELDS, r.edge[1], r.edge[2], r.slot, r.cur[1], r.cur[2], r.prev[1], r.prev[2], r.granted, r.at)
  redis.call('SET', key, raw, 'PX', KEPT_MS)
end

local function settle(r, now)
  local slot = math.floor(now / SLOT)
  local passed = slot - r.slot
  -- The clock was set back: the bucket is refilled from here on, as it was before.
  local back = math.max(0, r.at - now)
  for i = 1, 2 do
    r.edge[i] = r.edge[i] - back
    -- The memory of another clock.
    if r.edge[i] > now + 1 then r.edge[i] = 0 end
    if passed >= 1 then r.edge[i] = math.max(r.edge[i], (r.slot + 1) * SLOT - 1 + r.prev[i] + r.cur[i]) end
    if passed >= 2 then r.edge[i] = math.max(r.edge[i], (r.slot + 2) * SLOT - 1 + r.cur[i]) end
    if passed ~= 0 then
      r.prev[i] = passed == 1 and r.cur[i] or 0
      r.cur[i] = 0
    end
    r.edge[i] = math.max(r.edge[i], now - 1 + r.prev[i] + r.cur[i])
  end
  r.slot = slot
end

-- Of a slot's leases, so much was spent, and so much is not needed any more.
local function report(r, slot, i, spent, returned)
  local lent = slot == r.slot and r.cur or slot == r.slot - 1 and r.prev
  if not lent then return end
  returned = math.min(returned, math.max(0, lent[i] - spent))
  lent[i] = math.max(0, lent[i] - spent - returned)
  r.edge[i] = r.edge[i] - returned
end

local function there(r, i, now, cost)
  return math.max(0, math.floor((now - r.edge[i]) / cost + TOLERANCE))
end

-- How many of the calls that wait fit both buckets, and the time until one more does. Half a call is of no use: tokens for it
-- would be lost.
local function fit(r, now, cost, must)
  local calls = math.max(1, must[1])
  local fitting, wait = calls, 0
  for i = 1, 2 do
    local each = must[i] / calls
    if each > 0 then fitting = math.min(fitting, math.floor(there(r, i, now, cost[i]) / each + TOLERANCE)) end
  end
  for i = 1, 2 do
    if fitting < calls then wait = math.max(wait, r.edge[i] + (fitting + 1) * must[i] / calls * cost[i] - now) end
  end
  return fitting / calls, wait
end

-- The part of what is wanted in advance that is granted: at most half of the calls that still fit, since other hosts may need
-- the rest now.
local function advance(r, now, cost, must, want)
  local calls = math.max(1, want[1])
  local fitting = math.huge
  for i = 1, 2 do
    local each = want[i] / calls
    if each > 0 then fitting = math.min(fitting, math.floor((there(r, i, now, cost[i]) - must[i]) / each + TOLERANCE)) end
  end
  return math.max(0, math.min(1, math.ceil(fitting / 2) / calls))
end

local function grant(r, i, cost, given)
  r.edge[i] = r.edge[i] + given * cost
  r.cur[i] = r.cur[i] + given * cost
  return given
end

-- KEY, then for requests and units: the cost of one, the tokens needed, and the tokens wanted in advance; then twice a slot,
-- the seconds of its leases that were spent since the last report, and the seconds that are returned.
-- Returns the tokens granted, the life of the lease and the wait in µs, all grants of late in thousandths of a token, the slot, and
-- what the request bucket still holds in µs.
local function lease(keys, args)
  local a = {}
  for i, text in ipairs(args) do a[i] = tonumber(text) end
  local now = clock()
  local r = load(keys[1], now)
  settle(r, now)
  for at = 7, 12, 5 do
    report(r, a[at], 1, a[at + 1], a[at + 3])
    report(r, a[at], 2, a[at + 2], a[at + 4])
  end
  local cost = {a[1], a[2]}
  local part, wait = fit(r, now, cost, {a[3], a[4]})
  local must = {math.floor(a[3] * part + TOLERANCE), math.floor(a[4] * part + TOLERANCE)}
  local more = advance(r, now, cost, must, {a[5], a[6]})
  local requests = grant(r, 1, cost[1], must[1] + math.floor(a[5] * more + TOLERANCE))
  local units = grant(r, 2, cost[2], must[2] + math.floor(a[6] * more + TOLERANCE))
  r.granted = r.granted * math.exp((r.at - now) / MEMORY_S) + requests
  r.at = now
  save(keys[1], r)
  return {
    requests, units, math.floor(((r.slot + 2) * SLOT - now) * 1e6), math.ceil(wait * 1e6),
    math.floor(r.granted * 1000), r.slot, math.floor(math.min(1, now - r.edge[1]) * 1e6),
  }
end

-- KEY, name, milliseconds: the name is present for that long. Returns all names that are present.
local function members(keys, args)
  local now = clock() * 1000
  redis.call('ZADD', keys[1], now + tonumber(args[2]), args[1])
  redis.call('ZREMRANGEBYSCORE', keys[1], '-inf', now)
  redis.call('PEXPIRE', keys[1], args[2])
  return redis.call('ZRANGE', keys[1], 0, -1)
end

-- The same, but returns how many there are.
local function present(keys, args)
  return #members(keys, args)
end

-- KEY, host, count, milliseconds: a host has this many open. Returns how many all hosts have.
local function count(keys, args)
  local now = clock() * 1000
  local sum = 0
  redis.call('HSET', keys[1], args[1], args[2] .. ':' .. string.format('%.0f', now + tonumber(args[3])))
  local all = redis.call('HGETALL', keys[1])
  for i = 1, #all, 2 do
    local open, ends = string.match(all[i + 1], '^(%d+):(%d+)$')
    if tonumber(ends) <= now or open == '0' then
      redis.call('HDEL', keys[1], all[i])
    else
      sum = sum + tonumber(open)
    end
  end
  redis.call('PEXPIRE', keys[1], args[3])
  return sum
end

-- KEY, channel, message, milliseconds: publishes a head, and keeps it for hosts that start.
local function head(keys, args)
  redis.call('SET', keys[1], args[2], 'PX', args[3])
  return redis.call('PUBLISH', args[1], args[2])
end

redis.register_function('penstock_lease_1', lease)
redis.register_function('penstock_head_1', head)
redis.register_function('penstock_present_1', present)
redis.register_function('penstock_members_1', members)
redis.register_function('penstock_count_1', count)
