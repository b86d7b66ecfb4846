package dispatch

import "github.com/redis/go-redis/v9"

// The heads of scripts: names of keys, the time, and how a message is forgotten or goes back.
const (
	luaKeys = `
local queue, leases, bodies, scores, owners, delivs, delayed, dead = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local call = redis.call
`
	luaClock = `
local t = call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
`
	luaMoves = `
local function forget(gid)
  call('ZREM', leases, gid)
  call('HDEL', bodies, gid)
  call('HDEL', scores, gid)
  call('HDEL', owners, gid)
end
local function back(gid)
  local body = call('HGET', bodies, gid)
  if body then call('ZADD', queue, call('HGET', scores, gid) or 0, body) end
  forget(gid)
end
`
)

// script is a Lua script with all heads.
func script(body string) *redis.Script { return redis.NewScript(luaKeys + luaClock + luaMoves + body) }

var (
	// ARGV: ttl, then gid, member, token, request token of each. KEYS 9 and on: markers of their
	// cancellation, or none. Returns for each its deliveries, 0 if it is not to be had, -1 if it is
	// cancelled. A generation that is leased or delayed already was enqueued twice: the second copy
	// goes, and gets the first one's result. A claim that is repeated because its answer was lost
	// gives the same.
	claimScript = redis.NewScript(luaKeys + luaClock + `
local out = {}
for i = 2, #ARGV, 4 do
  local gid, member = ARGV[i], ARGV[i+1]
  local score = call('ZSCORE', queue, member)
  local marker = KEYS[9 + (i - 2) / 4]
  if not score then
    if call('HGET', owners, gid) == ARGV[i+2] then
      out[#out+1] = tonumber(call('HGET', delivs, gid))
    else
      out[#out+1] = 0
    end
  elseif call('HEXISTS', bodies, gid) == 1 then
    call('ZREM', queue, member)
    out[#out+1] = 0
  elseif marker and ARGV[i+3] ~= '' and call('GET', marker) == ARGV[i+3] then
    out[#out+1] = -1
  else
    call('ZREM', queue, member)
    call('ZADD', leases, now + ARGV[1], gid)
    call('HSET', bodies, gid, member)
    call('HSET', scores, gid, score)
    call('HSET', owners, gid, ARGV[i+2])
    out[#out+1] = call('HINCRBY', delivs, gid, 1)
  end
end
return out`)
	// ARGV: ttl, then gid, token of each.
	renewScript = script(`
local out = {}
for i = 2, #ARGV, 2 do
  local gid = ARGV[i]
  if call('HGET', owners, gid) == ARGV[i+1] then
    call('ZADD', leases, now + ARGV[1], gid)
    out[#out+1] = 1
  else
    out[#out+1] = 0
  end
end
return out`)
	// ARGV: gid, token, result, request token of each. KEYS 9 and on: result list and markers of each.
	// Returns for each 1, 0 if somebody else has it, or why its result could not be pushed. The others
	// do not suffer from that.
	publishScript = redis.NewScript(luaKeys + `
local out = {}
for i = 1, #ARGV, 4 do
  local gid, request, k = ARGV[i], ARGV[i+3], 9 + (i - 1) / 4 * 3
  local said = 0
  if call('HGET', owners, gid) == ARGV[i+1] then
    local pushed = redis.pcall('LPUSH', KEYS[k], ARGV[i+2])
    if type(pushed) == 'table' then
      said = pushed.err
    else
      call('ZREM', leases, gid)
      call('HDEL', bodies, gid)
      call('HDEL', scores, gid)
      call('HDEL', owners, gid)
      call('HDEL', delivs, gid)
      if request ~= '' then
        if call('GET', KEYS[k+1]) == request then call('DEL', KEYS[k+1]) end
        if call('GET', KEYS[k+2]) == request then call('DEL', KEYS[k+2]) end
      end
      said = 1
    end
  end
  out[#out+1] = said
end
return out`)
	// ARGV: gid, token or '' for one that is still in the queue, member, result or '', '1' if the lease
	// must have expired, request token, reason of the dead letter or '', most dead letters, its fields.
	// KEYS 9 to 11: result list, markers of the request.
	settleScript = script(`
local gid, token = ARGV[1], ARGV[2]
if token ~= '' then
  if call('HGET', owners, gid) ~= token then return 0 end
  if ARGV[5] == '1' then
    local expiry = call('ZSCORE', leases, gid)
    if expiry and tonumber(expiry) > now then return 0 end
  end
elseif call('ZREM', queue, ARGV[3]) == 0 then
  return 0
end
if ARGV[4] ~= '' and KEYS[9] then call('LPUSH', KEYS[9], ARGV[4]) end
if ARGV[7] ~= '' then
  local fields = {'reason', ARGV[7], 'ts_ms', string.format('%.0f', now)}
  for i = 9, #ARGV do fields[#fields+1] = ARGV[i] end
  call('XADD', dead, 'MAXLEN', '~', ARGV[8], '*', unpack(fields))
end
if token ~= '' then
  forget(gid)
  call('HDEL', delivs, gid)
end
if ARGV[6] ~= '' then
  for i = 10, #KEYS do
    if call('GET', KEYS[i]) == ARGV[6] then call('DEL', KEYS[i]) end
  end
end
return 1`)
	// ARGV: gid, token, delay in ms, member for the next attempt. To get so far shows that the message
	// crashes nobody, so its deliveries are forgotten.
	delayScript = script(`
local gid = ARGV[1]
if call('HGET', owners, gid) ~= ARGV[2] then return 0 end
call('ZREM', leases, gid)
call('HDEL', owners, gid)
call('HDEL', delivs, gid)
call('HSET', bodies, gid, ARGV[4])
call('ZADD', delayed, now + ARGV[3], gid)
return 1`)
	// ARGV: gid, token.
	releaseScript = script(`
local gid = ARGV[1]
if call('HGET', owners, gid) ~= ARGV[2] then return 0 end
back(gid)
if call('HINCRBY', delivs, gid, -1) <= 0 then call('HDEL', delivs, gid) end
return 1`)
	// ARGV: limit.
	promoteScript = script(`
local due = call('ZRANGEBYSCORE', delayed, '-inf', now, 'LIMIT', 0, ARGV[1])
for _, gid in ipairs(due) do
  call('ZREM', delayed, gid)
  back(gid)
end
return #due`)
	// ARGV: limit, most deliveries. Returns the number that went back into the queue, then gid, token,
	// member and deliveries of each that was delivered too often.
	reapScript = script(`
local out = {0}
for _, gid in ipairs(call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, ARGV[1])) do
  local n = tonumber(call('HGET', delivs, gid) or '1')
  if n < tonumber(ARGV[2]) then
    back(gid)
    out[1] = out[1] + 1
  else
    out[#out+1] = gid
    out[#out+1] = call('HGET', owners, gid) or ''
    out[#out+1] = call('HGET', bodies, gid) or ''
    out[#out+1] = n
  end
end
if call('EXISTS', queue, leases, delayed) == 0 then call('DEL', delivs) end
return out`)
	// ARGV: queue's members that came from elsewhere: gid, member, score, delay in ms of each.
	importScript = script(`
for i = 1, #ARGV, 4 do
  call('HSET', bodies, ARGV[i], ARGV[i+1])
  call('HSET', scores, ARGV[i], ARGV[i+2])
  call('ZADD', delayed, now + ARGV[i+3], ARGV[i])
end
return 1`)
)
